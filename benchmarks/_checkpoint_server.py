"""A fast S3 server in memory, for throughput: `python -m benchmarks._checkpoint_server PORT_FILE`.

moto's server parses and hashes each body in Python and takes longer than any client here; this one
receives bodies straight into blocks that it uses again, so that the clients are what is measured.
It knows what the clients of this benchmark ask: objects, ranges, multipart uploads, conditional
writes, copies, listings, aws-chunked bodies. It checks no signature and no checksum, and takes
paths with the bucket first. `GET /-/counts` says what was asked, `DELETE /-/objects` forgets all.
"""

from __future__ import annotations

import json
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BLOCK_BYTES = 1 << 20
CONTROL = "/-/"


@dataclass(frozen=True, kw_only=True)
class Body:
    """Bytes in blocks, of which the last is filled in part."""

    blocks: tuple[bytearray, ...]
    """All of `BLOCK_BYTES`."""
    size_bytes: int
    """Bytes that count."""

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """A range of it."""
        while start < stop:
            block, at = divmod(start, BLOCK_BYTES)
            end = min(BLOCK_BYTES, at + stop - start)
            yield memoryview(self.blocks[block])[at:end]
            start += end - at


@dataclass(frozen=True, kw_only=True)
class Object:
    """What lies under a key: one body, or those of its parts."""

    bodies: tuple[Body, ...]
    """One behind the other."""
    headers: dict[str, str]
    """`x-amz-meta-...` and `ETag`."""

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return sum(body.size_bytes for body in self.bodies)

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """A range of it."""
        begin = 0
        for body in self.bodies:
            end = begin + body.size_bytes
            if start < end and stop > begin:
                yield from body.views(max(start - begin, 0), min(stop, end) - begin)
            begin = end


@dataclass(kw_only=True)
class Shelf:
    """Everything that the server holds; its lock is held for dictionary operations only."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, tuple[dict[str, str], dict[int, Body]]] = field(default_factory=dict)
    free: list[bytearray] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def take_block(self) -> bytearray:
        """A block to fill: one that was used before, where there is one."""
        with self.lock:
            if self.free:
                return self.free.pop()
        return bytearray(BLOCK_BYTES)

    def count(self, kind: str, *, received: int = 0, sent: int = 0) -> None:
        """Notes a request."""
        with self.lock:
            self.counts[kind] += 1
            self.counts["requests"] += 1
            self.counts["received_bytes"] += received
            self.counts["sent_bytes"] += sent

    def forget(self) -> None:
        """Back to an empty server; nobody may be reading or writing."""
        with self.lock:
            bodies = [body for one in self.objects.values() for body in one.bodies]
            for _, parts in self.uploads.values():
                bodies += parts.values()
            # A copy shares its bodies with its source.
            blocks = {id(block): block for body in bodies for block in body.blocks}
            self.free += blocks.values()
            self.objects, self.uploads = {}, {}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 1 << 16
    shelf: Shelf

    def handle_one_request(self) -> None:
        """Clients that hang up are part of the game."""
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def parse(self) -> tuple[str, dict[str, list[str]]]:
        """The object's key with its bucket, and the query."""
        parts = urlsplit(self.path)
        return unquote(parts.path.lstrip("/")), parse_qs(parts.query, keep_blank_values=True)

    def do_GET(self) -> None:
        """An object, a range of it, or a listing."""
        if self.path.startswith(CONTROL):
            return self.reply(200, json.dumps(self.shelf.counts).encode())
        key, query = self.parse()
        if "/" not in key.rstrip("/"):
            return self.list_keys(key.rstrip("/"), query)
        found = self.shelf.objects.get(key)
        if found is None:
            return self.fail(404, "NoSuchKey", "get")
        start, stop = self.range_of(found.size_bytes)
        if start >= found.size_bytes > 0:
            return self.fail(416, "InvalidRange", "get")
        self.shelf.count("get", sent=stop - start)
        headers = dict(found.headers)
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size_bytes}"
        self.begin(206 if "Range" in self.headers else 200, stop - start, headers)
        for view in found.views(start, stop):
            self.wfile.write(view)

    def range_of(self, size_bytes: int) -> tuple[int, int]:
        """First byte and end of what is wanted."""
        wanted = self.headers.get("Range")
        if wanted is None:
            return 0, size_bytes
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        if not first:
            return max(0, size_bytes - int(last)), size_bytes
        return int(first), min(int(last) + 1 if last else size_bytes, size_bytes)

    def do_HEAD(self) -> None:
        """Size and metadata of an object; any bucket is there."""
        key, _ = self.parse()
        if "/" not in key.rstrip("/"):
            self.shelf.count("head")
            return self.begin(200, 0, {"x-amz-bucket-region": "us-east-1"})
        found = self.shelf.objects.get(key)
        if found is None:
            return self.fail(404, "NoSuchKey", "head")
        self.shelf.count("head")
        self.begin(200, found.size_bytes, found.headers)

    def do_PUT(self) -> None:
        """An object, a part of one, or a copy."""
        key, query = self.parse()
        body, metadata = self.receive(), self.metadata()
        if "uploadId" in query:
            with self.shelf.lock:
                upload = self.shelf.uploads.get(query["uploadId"][0])
                if upload is not None:
                    upload[1][int(query["partNumber"][0])] = body
            if upload is None:
                return self.fail(404, "NoSuchUpload", "part")
            self.shelf.count("part", received=body.size_bytes)
            return self.begin(200, 0, {"ETag": new_etag()})
        source = self.headers.get("x-amz-copy-source")
        bodies: tuple[Body, ...] = (body,)
        if source is not None:
            found = self.shelf.objects.get(unquote(source).lstrip("/"))
            if found is None:
                return self.fail(404, "NoSuchKey", "copy")
            bodies = found.bodies
        etag = self.put(key, Object(bodies=bodies, headers=metadata))
        if etag is None:
            return self.fail(412, "PreconditionFailed", "put")
        self.shelf.count("copy" if source else "put", received=body.size_bytes)
        if source is None:
            return self.begin(200, 0, {"ETag": etag})
        self.reply(200, xml("CopyObjectResult", f"<ETag>{etag}</ETag>"))

    def put(self, key: str, new: Object) -> str | None:
        """Makes an object visible, unless the request asks for a key that is free and it is not."""
        new.headers["ETag"] = new_etag()
        with self.shelf.lock:
            if self.headers.get("If-None-Match") == "*" and key in self.shelf.objects:
                return None
            self.shelf.objects[key] = new
        return new.headers["ETag"]

    def do_POST(self) -> None:
        """Begins or completes a multipart upload, or deletes many objects."""
        key, query = self.parse()
        if "uploads" in query:
            self.receive()
            upload_id = uuid.uuid4().hex
            with self.shelf.lock:
                self.shelf.uploads[upload_id] = self.metadata(), {}
            self.shelf.count("create")
            return self.reply(200, xml("InitiateMultipartUploadResult", names(key, upload_id)))
        text = b"".join(bytes(view) for view in whole(self.receive()))
        if "uploadId" in query:
            with self.shelf.lock:
                upload = self.shelf.uploads.pop(query["uploadId"][0], None)
            if upload is None:
                return self.fail(404, "NoSuchUpload", "complete")
            bodies = tuple(upload[1][number] for number in sorted(upload[1]))
            etag = self.put(key, Object(bodies=bodies, headers=upload[0]))
            self.shelf.count("complete")
            inside = f"{names(key, '')}<ETag>{etag}</ETag>"
            return self.reply(200, xml("CompleteMultipartUploadResult", inside))
        bucket = key.rstrip("/")
        for name in text.decode().split("<Key>")[1:]:
            self.drop(f"{bucket}/{name.partition('</Key>')[0]}")
        self.shelf.count("delete")
        self.reply(200, xml("DeleteResult", ""))

    def do_DELETE(self) -> None:
        """Removes an object or an upload."""
        if self.path.startswith(CONTROL):
            self.shelf.forget()
            return self.begin(204, 0, {})
        key, query = self.parse()
        if "uploadId" in query:
            with self.shelf.lock:
                self.shelf.uploads.pop(query["uploadId"][0], None)
        else:
            self.drop(key)
        self.shelf.count("delete")
        self.begin(204, 0, {})

    def drop(self, key: str) -> None:
        """Its blocks come free with `forget`, when nobody can be reading them."""
        with self.shelf.lock:
            self.shelf.objects.pop(key, None)

    def list_keys(self, bucket: str, query: dict[str, list[str]]) -> None:
        """All keys below a prefix in one page, as both versions of the listing have it."""
        self.shelf.count("list")
        if "uploads" in query:
            return self.reply(200, xml("ListMultipartUploadsResult", ""))
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        with self.shelf.lock:
            known = {key: found.size_bytes for key, found in self.shelf.objects.items()}
        folders, rows = set(), []
        for full, size in sorted(known.items()):
            key = full.removeprefix(f"{bucket}/")
            if key == full or not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(prefix + head + cut)
            else:
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>0</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        ]
        facts = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated><KeyCount>{len(rows)}"
        self.reply(200, xml("ListBucketResult", f"{facts}</KeyCount>{''.join(rows)}"))

    # -- bodies ------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, str]:
        """What the client wants kept with the object."""
        return {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta-")}

    def receive(self) -> Body:
        """The request's body."""
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            return self.gather(chunk_sizes(self.rfile))
        return self.gather([int(self.headers.get("Content-Length") or 0)])

    def gather(self, sizes: Iterator[int] | list[int]) -> Body:
        """Bytes that follow each other, in runs of `sizes`."""
        blocks: list[bytearray] = []
        total = 0
        for size in sizes:
            while size:
                at = total % BLOCK_BYTES
                if at == 0:
                    blocks.append(self.shelf.take_block())
                got = self.rfile.readinto(memoryview(blocks[-1])[at : at + size])
                if not got:
                    raise ConnectionResetError
                total, size = total + got, size - got
        return Body(blocks=tuple(blocks), size_bytes=total)

    # -- answers -----------------------------------------------------------------------------------

    def begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        """Status and headers."""
        self.send_response_only(status)
        self.send_header("Date", formatdate(usegmt=True))
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def reply(self, status: int, body: bytes) -> None:
        """A whole answer."""
        self.begin(status, len(body), {"Content-Type": "application/xml"})
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str, kind: str) -> None:
        """S3's form of an error."""
        self.shelf.count(kind)
        self.reply(status, xml("Error", f"<Code>{code}</Code><Message>{code}</Message>"))


def chunk_sizes(file: BufferedIOBase) -> Iterator[int]:
    """The sizes of an aws-chunked body's runs; between two of them it reads what frames them."""
    while size := int(file.readline().partition(b";")[0], 16):
        yield size
        file.readline()
    while file.readline().strip():
        pass  # trailing checksums


def whole(body: Body) -> Iterator[memoryview]:
    """All of it."""
    return body.views(0, body.size_bytes)


def xml(name: str, inside: str) -> bytes:
    """An answer's document."""
    space = "" if name == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}{space}>{inside}</{name}>'.encode()


def names(path: str, upload_id: str) -> str:
    """Bucket, key and upload."""
    bucket, _, key = path.partition("/")
    upload = f"<UploadId>{upload_id}</UploadId>" if upload_id else ""
    return f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>{upload}"


def new_etag() -> str:
    """Unique; not the MD5 that it is on S3."""
    return f'"{uuid.uuid4().hex}"'


class Server(ThreadingHTTPServer):
    """Answers as S3 would, on loopback, each connection on a thread."""

    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """Serves until it is killed."""
    Handler.shelf = Shelf()
    server = Server(("127.0.0.1", 0), Handler)
    target = Path(sys.argv[1])
    part = target.with_suffix(".part")
    part.write_text(str(server.server_address[1]))
    part.replace(target)
    server.serve_forever()


if __name__ == "__main__":
    main()
