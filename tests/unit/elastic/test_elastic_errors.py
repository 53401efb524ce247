from __future__ import annotations

import pickle

import pytest

import elastic
from elastic import errors

ALL = [
    errors.ResourcesError("4 workers with 1 CPU each", "the cluster has 2 CPU", 60.0, "Add nodes"),
    errors.RunFailedError("user code raised, 2 times at step 3", "user_error"),
    errors.RunStoppedError("/data/runs/llama", "stopped", 600),
    errors.SuspectFileError("/data/runs/suspect-nodes.json", "it has no object 'machines'"),
    errors.WebhookError("the webhook at example.org", "HTTP status 503", "Look at its URL"),
    errors.WebhookRefusedError("the webhook at example.org", "HTTP status 404", "Look at its URL"),
    errors.RunGoesOnError("run_config.name", "run", "run.lock is locked", "Wait for it"),
    errors.ProviderAwayError("PATCH /api/v1/nodes/n1", "HTTP Error 429", "Look at its API server"),
    errors.ReplaceError("i-0123", "no instance of this id has the tag a=b", "Look at the tags"),
    errors.NoCapacityError("i-0123", "no capacity in subnet-1", "Add subnets"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_an_error_survives_pickling(error: errors.ElasticError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (back.args, back.__dict__, str(back)) == (error.args, error.__dict__, str(error))


def test_the_tree_is_complete_and_drawn() -> None:
    tree = {c for c in vars(errors).values() if isinstance(c, type)} - {errors.ElasticError}
    assert {type(error) for error in ALL} == tree
    assert all(issubclass(cls, errors.ElasticError) for cls in tree)
    assert errors.__doc__ is not None
    assert [cls.__name__ for cls in tree if f"── {cls.__name__} " not in errors.__doc__] == []


def test_the_message_is_the_fact_the_numbers_and_the_next_knob() -> None:
    assert str(ALL[0]) == (
        "the smallest layout needs 4 workers with 1 CPU each, but the cluster has 2 CPU "
        "(waited 60 s, scaling.wait_s). Add nodes."
    )


def test_the_public_names_are_these() -> None:
    assert elastic.__all__ == [
        "Callback",
        "CausalLM",
        "CheckpointConfig",
        "CheckpointConfigError",
        "CheckpointError",
        "ConfigError",
        "CustomTask",
        "DataConfig",
        "Ec2Nodes",
        "ElasticError",
        "ElasticTrainer",
        "Fault",
        "Float8",
        "HealthConfig",
        "KubeNodes",
        "LocalNodes",
        "ModelConfig",
        "OffloadConfig",
        "OptimizerConfig",
        "ParallelConfig",
        "RayNodes",
        "ResourcesError",
        "RunFailedError",
        "RunStoppedError",
        "S3Config",
        "ScalingConfig",
        "Steps",
        "TrainConfig",
        "TrainerError",
        "TrainingHealthConfig",
        "TransformerEngine",
        "parse_faults",
    ]
    for name in elastic.__all__:
        assert getattr(elastic, name).__name__ == name
    with pytest.raises(AttributeError):
        elastic.Membership  # noqa: B018
