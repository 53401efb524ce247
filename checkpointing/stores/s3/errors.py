"""What a failed request to S3 means: try again, slow down, or give up, and what to tell the user.

The table of S3's error codes serves boto3 and s5cmd alike. Nothing of a response but its code and
the region it names goes into a message: the rest may hold parts of a signature.
Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from checkpointing.errors import CorruptError, MissingError, StoreError, StoreUnavailableError
from checkpointing.format.layout import rank_of

Answer = Literal["retry", "slow", "refused"]

DIGEST = "BadDigest"
"""Our name, and S3's, for bytes that are not those that were sent."""

_POLICY = "give its identity the actions in examples/aws/iam-policy.json"
_PLACES = "(environment, ~/.aws, or the role of the instance)"
_LOGIN = f"renew them {_PLACES}"

_REFUSED = {
    "NoSuchBucket": "there is no such bucket; correct checkpoint.store, or create the bucket",
    "NoSuchUpload": "somebody has aborted this upload; is another run using the same name?",
    "AccessDenied": f"access denied; {_POLICY}, and check S3Config.expected_owner if it is set",
    "AllAccessDisabled": f"access denied; {_POLICY}",
    "AccountProblem": "the account cannot be used; ask AWS support",
    "InvalidAccessKeyId": f"the access key is not known there; {_LOGIN}",
    "SignatureDoesNotMatch": f"the secret key does not fit the access key; {_LOGIN}",
    "InvalidToken": f"the session token is not valid; {_LOGIN}",
    "ExpiredToken": f"the credentials have expired; {_LOGIN}",
    "TokenRefreshRequired": f"the credentials have expired; {_LOGIN}",
    "400": f"the request is not valid there, as with credentials that have expired; {_LOGIN}",
    "NoCredentials": f"there are no AWS credentials; provide them {_PLACES}",
    "RequestTimeTooSkewed": "this node's clock is wrong; synchronise it (chronyc makestep)",
    "PermanentRedirect": "the bucket is in another region; set S3Config.region",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set S3Config.region",
    "IllegalLocationConstraintException": "the bucket is in another region; set S3Config.region",
    "KMS.DisabledException": "the KMS key is disabled; enable it, or set another kms_key_id",
    "KMS.NotFoundException": "there is no such KMS key; correct S3Config.kms_key_id",
    "NotImplemented": "the server does not know this request; use one that S3's clients work with",
    "SSL": "its certificate is not trusted; set AWS_CA_BUNDLE, or correct S3Config.endpoint_url",
}
LOGIN_CODES = frozenset(code for code, fact in _REFUSED.items() if _PLACES in fact)
"""What is said of credentials that do not serve."""

# What HEAD says, which has no body and so no code, and codes that mean the same as another. Its
# "400" stands above: an expired token is answered so.
_ALIASES = {
    "403": "AccessDenied",
    "Forbidden": "AccessDenied",
    "301": "PermanentRedirect",
    "404": "NoSuchKey",
    "408": "RequestTimeout",
    "NotFound": "NoSuchKey",
    "412": "PreconditionFailed",
    "416": "InvalidRange",
    "ExpiredTokenException": "ExpiredToken",
}
_SLOW = {
    "SlowDown",
    "503",
    "429",
    "TooManyRequests",
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "KMS.ThrottlingException",
}
_RETRY = {
    DIGEST: "bytes changed on their way",
    "InvalidDigest": "bytes changed on their way",
    "XAmzContentChecksumMismatch": "bytes changed on their way",
    "ConditionalRequestConflict": "another write of this key was under way",
    "OperationAborted": "another write of this key was under way",
    "RequestTimeout": "the request took too long to arrive",
    "IncompleteBody": "the request was cut off",
}
_SETTINGS = (
    boto.ParamValidationError,
    boto.NoRegionError,
    boto.ConfigNotFound,
    boto.ConfigParseError,
    boto.InvalidConfigError,
    boto.ProfileNotFound,
    boto.UnknownCredentialError,
    boto.RefreshWithMFAUnsupportedError,
    boto.MissingDependencyException,
)
"""What boto3 raises of its own, before it asks anybody; asked again it says the same."""

_SETTINGS_FACT = "boto3 cannot ask; check S3Config, the environment and ~/.aws on this node"
_SLOW_FACT = "S3 asked to slow down; save less often, or raise S3Config.timeout_s"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong with one request."""

    code: str
    """S3's error code, or the name of our client's error."""
    answer: Answer
    """What to do."""
    fact: str
    """What to tell the user, with the next knob."""


class Refused(Exception):
    """A request that need not be repeated; whoever knows what was asked says what it means."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def read_failure(error: BaseException) -> Failure:
    """What an error of boto3 means."""
    if isinstance(error, ClientError):
        return _read_response(error.response)
    for kind, code in (
        (boto.NoCredentialsError, "NoCredentials"),
        (boto.PartialCredentialsError, "NoCredentials"),
        (boto.TokenRetrievalError, "ExpiredToken"),
        (boto.SSOError, "ExpiredToken"),
    ):
        if isinstance(error, kind):
            return decide_failure(code, 0)
    if isinstance(error, _SETTINGS):
        return Failure(code=type(error).__name__, answer="refused", fact=_SETTINGS_FACT)
    # Every connection that breaks in TLS is an SSLError, too; only a certificate stays as it is.
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return decide_failure("SSL", 0)
    if isinstance(error, boto.FlexibleChecksumError):
        return decide_failure(DIGEST, 0)
    return Failure(code=type(error).__name__, answer="retry", fact=_network_fact(error))


def decide_failure(
    code: str, status: int, *, region: str | None = None, skew_s: float | None = None
) -> Failure:
    """What an answer of the service means.

    Args:
        code: S3's error code, or the HTTP status in words where there was no body.
        status: HTTP status, 0 where none is known.
        region: the bucket's region, where the answer names it.
        skew_s: by how much this node's clock is ahead of the server's, where that is known.
    """
    code = _ALIASES.get(code, code)
    if code in _SLOW or (status in (429, 503) and code not in _RETRY):
        return Failure(code=code, answer="slow", fact=_SLOW_FACT)
    if code in _RETRY or status == 408:
        fact = _RETRY.get(code, _RETRY["RequestTimeout"])
        return Failure(code=code, answer="retry", fact=fact)
    if status >= 500 or code in ("InternalError", "ServiceUnavailable"):
        return Failure(code=code, answer="retry", fact=f"S3 failed ({code})")
    fact = _REFUSED.get(code, f"S3 refused ({code})")
    if region is not None and "region" in fact:
        fact = f"the bucket is in {region}; set S3Config.region='{region}'"
    if code == "RequestTimeTooSkewed" and skew_s is not None:
        fact = f"this node's clock is off by {skew_s:+.0f} s; synchronise it (chronyc makestep)"
    return Failure(code=code, answer="refused", fact=fact)


def refused(failure: Failure, where: str) -> StoreError:
    """The error for a request that need not be repeated. `where`: URL of the object or bucket."""
    rank = _rank_text(where)
    if failure.code == "NoSuchKey":
        return MissingError(where, f"{rank}no such object")
    return StoreUnavailableError(where, None, f"{rank}{failure.fact} [{failure.code}]")


def gave_up(failure: Failure, where: str, tries: int, elapsed_s: float) -> Exception:
    """The error for a request that was repeated until its time was over."""
    fact = f"{_rank_text(where)}{failure.fact} [{failure.code}; {tries} tries in {elapsed_s:.1f} s]"
    if failure.code in (DIGEST, "InvalidDigest", "XAmzContentChecksumMismatch"):
        return CorruptError(where, fact + "; check the network card and memory of this node")
    return StoreUnavailableError(where, None, fact, may_pass=True)


def not_set_up(error: BotoCoreError | OSError | ValueError, where: str) -> StoreUnavailableError:
    """The error for settings of this node that no client can be made with. `where`: URL of the
    store. What an endpoint is set to is left out: it may hold a password."""
    if isinstance(error, boto.ProfileNotFound):
        fact = "AWS_PROFILE names a profile that is not in ~/.aws on this node; correct either"
    elif isinstance(error, boto.InvalidRegionError):
        fact = "the region is no name of one; correct S3Config.region or AWS_DEFAULT_REGION"
    elif type(error) is not ValueError:  # as of a credential_process that prints no JSON
        fact = "boto3 cannot be set up; check the environment and ~/.aws on this node"
    else:
        known = "AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL"
        fact = f"the server to ask is not http(s)://HOST[:PORT]; correct {known}"
    return StoreUnavailableError(where, None, f"{fact} [{type(error).__name__}]")


def _read_response(response: Mapping[str, Any]) -> Failure:
    error, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    return decide_failure(
        str(error.get("Code", "")),
        int(metadata.get("HTTPStatusCode", 0)),
        region=error.get("Region") or headers.get("x-amz-bucket-region"),
        skew_s=_skew_s(headers.get("date")),
    )


def _skew_s(date: str | None) -> float | None:
    try:
        return time.time() - parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None


def _network_fact(error: BaseException) -> str:
    if isinstance(error, boto.IncompleteReadError | boto.ResponseStreamingError):
        return "the answer was cut off"
    if isinstance(error, boto.CredentialRetrievalError):
        return f"the credentials could not be fetched; {_LOGIN}"
    if isinstance(error, boto.ConnectTimeoutError | boto.EndpointConnectionError):
        return "the server cannot be reached; check S3Config.endpoint_url, routes and proxies"
    if isinstance(error, boto.ReadTimeoutError | TimeoutError):
        return "no answer in time; raise S3Config.part_timeout_s if the network is this slow"
    if isinstance(error, BotoCoreError | HTTPError | OSError):
        return f"the connection failed ({type(error).__name__})"
    return type(error).__name__


def _rank_text(where: str) -> str:
    rank = rank_of(where)
    return "" if rank is None else f"rank {rank}: "
