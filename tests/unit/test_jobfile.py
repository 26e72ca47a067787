from pathlib import Path

import pytest

from horizonml.errors import JobError
from horizonml.job.jobfile import json_schema, load, parse

ERRORS = [
    # job file, overrides, words of the message
    ("paralel: {}", [], "paralel: unknown key; did you mean 'parallel'?"),
    ("optimizer: {name: adan}", [], "optimizer.name: 'adan' is not one of sgd, adam, adamw; did you mean 'adam'?"),
    ("batch_size: -3", [], "batch_size: -3 must be greater than or equal to 1"),
    ("epochs: '5'", [], "epochs: '5' must be a valid integer"),
    ("parallel: {stages: [{ranks: [0], share: [1]}]}", [], "parallel.stages.0.share: unknown key; did you mean"),
    ("parallel: {stages: [{ranks: [0, 1], shares: [1]}]}", [], "shares: 1 share for 2 ranks"),
    ("parallel: {stages: [{ranks: [0, 1], shares: [1, 0]}]}", [], "must all be above 0"),
    ("parallel: {stages: [{ranks: [0, 2]}]}", [], "ranks [0, 2] must be 0 to 1"),
    ("parallel: {stages: [{ranks: [0]}, {ranks: [1], layers: [3, 5]}]}", [], "of all stages, or of none"),
    (
        "parallel: {stages: [{ranks: [0], layers: [0, 2]}, {ranks: [1], layers: [4, 5]}]}",
        [],
        "stage 1 starts at layer 4, but layer 3 comes next",
    ),
    (
        "parallel: {stages: [{ranks: [0], split: channels}, {ranks: [1]}]}",
        [],
        "splits channels; only a plan of one",
    ),
    (
        "parallel: {gradient_compression: fp16, stages: [{ranks: [0, 1], split: channels}]}",
        [],
        "gradient_compression: strategy tensor cannot use fp16",
    ),
    (
        "parallel: {strategy: single, workers: 3}",
        [],
        "choose parallel.strategy ddp, pipeline or hybrid, or 1 worker (--workers 1)",
    ),
    ("parallel: {strategy: hybrid, workers: 2}", [], "needs at least 3 ranks"),
    ("parallel: {strategy: ddp, workers: 3, min_workers: 4}", [], "min_workers: 4 is more than workers, 3"),
    ("parallel: {strategy: ddp, workers: 3, max_workers: 2}", [], "max_workers: 2 is less than workers, 3"),
    ("parallel: {strategy: ddp, min_workers: 4, max_workers: 2}", [], "make it 2 or less"),
    ("parallel: {strategy: hybrid, min_workers: 2}", [], "hybrid needs at least 3 ranks, not 2; set it to 3 or more"),
    ("parallel: {strategy: single, max_workers: 2}", [], "choose ddp or leave it out"),
    ("parallel: {min_workers: 1, stages: [{ranks: [0, 1]}]}", [], "a plan for exactly 2 ranks; leave min_workers out"),
    ("parallel: {workers: 3, stages: [{ranks: [0, 1]}]}", [], "workers: 3, but stages names 2 ranks"),
    ("parallel: {micro_batches: 9}\nbatch_size: 8", [], "parallel.micro_batches: 9 is more than batch_size (8)"),
    ("data: {samples: 10}", [], "batch_size: 64 is more than data.samples (10)"),
    ("data: {name: folder}", [], "data.folder: name the directory"),
    ("data: null", [], "data: None must be a section"),
    ("model: {name: resnet19}", [], "did you mean 'resnet18'?"),
    ("optimizer: {momentum: 0, nesterov: true}", [], "needs momentum above 0"),
    ("optimizer: {name: adam, betas: [0.9, 1.0]}", [], "must both lie in [0, 1)"),
    ("rendezvous: {address: nowhere}", [], "'nowhere' is not host:port"),
    ("name: a b", [], "name: 'a b' must begin with a letter or digit and contain only"),
    ("a: 1\na: 2", [], "job.yaml:2:1: key 'a' is given twice"),
    ("a: [1", [], "job.yaml:1:6"),
    ("- 1", [], "a job file is a mapping"),
    ("", ["epochs"], "--set epochs: write it as section.key=value"),
    ("seed: 1", ["seed.x=1"], "seed is 1, which has no keys"),
    ("!!python/object/apply:os.system ['true']", [], "could not determine a constructor"),
]


def test_errors_name_the_field_the_value_and_the_fix() -> None:
    for text, overrides, words in ERRORS:
        with pytest.raises(JobError) as caught:
            parse(text, "job.yaml", overrides)
        assert words in str(caught.value)
        assert caught.value.exit_code == 2


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(JobError) as caught:
        parse("epochs: 0\nbatch_size: 0\nsead: 1", "job.yaml")
    assert len(str(caught.value).splitlines()) == 4


def test_overrides_win_and_keep_their_types() -> None:
    job = parse(
        "optimizer: {lr: 1e-3}",
        "job.yaml",
        ["parallel.strategy=pipeline", "parallel.workers=5", "optimizer.momentum=0.5"],
    )
    assert (job.optimizer.lr, job.parallel.strategy, job.parallel.workers) == (0.001, "pipeline", 5)
    assert job.optimizer.model_dump()["momentum"] == 0.5


def test_ready_jobs_are_valid() -> None:
    for path in Path("jobs").glob("*.yaml"):
        assert load(path).name == path.stem


def test_the_digest_tells_jobs_apart_but_not_machines() -> None:
    job = parse("", "job.yaml")
    assert job.digest() != parse("seed: 1", "job.yaml").digest()
    elsewhere = parse("", "job.yaml", ["folder=/data/run", "rendezvous.address=10.0.0.1:29400", "data.folder=/data"])
    assert job.digest() == elsewhere.digest()


def test_the_schema_documents_every_field() -> None:
    schema = json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert len(sections) > 8
    for section in sections:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            assert "description" in field or "$ref" in field or "discriminator" in field or name == "name", name


def test_a_dumped_job_reads_back() -> None:
    import yaml

    job = parse(
        "parallel: {stages: [{ranks: [0], layers: [0, 1]}, {ranks: [1, 2], shares: [1, 3], layers: [2, 4]}]}", "j"
    )
    assert parse(yaml.safe_dump(job.model_dump(exclude_none=True)), "again") == job


def test_horovod_that_is_not_installed_is_named_with_the_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from horizonml.runtime import launch

    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"needs Horovod, which is not installed; `make horovod` builds it"):
        launch.check_strategy(parse("parallel: {strategy: horovod}", "job.yaml"))
    launch.check_strategy(parse("parallel: {strategy: ddp}", "job.yaml"))
