import pytest

from horizonml.errors import IdentityError
from horizonml.rendezvous.identity import ASKED, Identity, identify

SOURCES = [
    ("RANK", {"RANK": "2", "WORLD_SIZE": "5"}),
    ("Indexed Job", {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "5"}),
    ("StatefulSet", {"POD_INDEX": "2", "WORLD_SIZE": "5"}),
    ("StatefulSet", {"HOSTNAME": "worker-2", "WORLD_SIZE": "5"}),
    ("horovodrun", {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "5"}),
    ("Open MPI", {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "5"}),
    ("MVAPICH", {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "5"}),
    ("PMI", {"PMI_RANK": "2", "PMI_SIZE": "5"}),
    ("PMIx", {"PMIX_RANK": "2", "SLURM_NTASKS": "5"}),
    ("Slurm", {"SLURM_PROCID": "2", "SLURM_NTASKS": "5", "SLURM_STEP_ID": "0"}),
    ("Kubeflow Trainer", {"PET_NODE_RANK": "2", "PET_NNODES": "5"}),
]


def test_each_source_gives_rank_and_world_size() -> None:
    for source, env in SOURCES:
        assert identify({**env, "HOME": "/root"}) == Identity(2, 5, source)


def test_the_first_source_wins() -> None:
    env: dict[str, str] = {}
    for source, own in reversed(SOURCES):
        env = {key: "1" if value == "2" else "9" for key, value in env.items() if key != "HOSTNAME"} | own
        assert identify(env) == Identity(2, 5, source)
    found = identify({"POD_INDEX": "1", "HOSTNAME": "worker-3", "WORLD_SIZE": "5"})
    assert found is not None
    assert found.rank == 1


def test_nothing_found_is_alone() -> None:
    for env in (
        {},
        {"HOSTNAME": "worker-2"},
        {"WORLD_SIZE": "5", "HOSTNAME": "laptop"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    ):
        assert identify(env) is None


def test_contradictions_are_named() -> None:
    for env, words in (
        ({"RANK": "1"}, r"RANK is set \(1\) but WORLD_SIZE is not"),
        ({"HOSTNAME": "worker-7", "WORLD_SIZE": "5"}, "ranks go from 0 to 4"),
        ({"RANK": "x", "WORLD_SIZE": "5"}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
    ):
        with pytest.raises(IdentityError, match=words):
            identify(env)


def test_pods_of_an_elastic_job_ask_for_the_world_size_and_those_beyond_their_class_for_a_number() -> None:
    elastic = {"HORIZONML_ELASTIC": "1", "HOSTNAME": "mine-pi-2"}
    for env, rank, source in (
        ({}, 2, "StatefulSet"),
        ({"HORIZONML_RANKS": "3-5"}, 5, "StatefulSet"),
        ({"HORIZONML_RANKS": "3-4"}, ASKED, "StatefulSet"),
        ({"JOB_COMPLETION_INDEX": "0", "HORIZONML_RANKS": "3-5"}, 3, "Indexed Job"),
        ({"WORLD_SIZE": "7"}, 2, "StatefulSet"),  # which is the service's
    ):
        assert identify({**elastic, **env}) == Identity(rank, ASKED, source)
    assert identify({**elastic, "RANK": "1", "WORLD_SIZE": "3"}) == Identity(1, 3, "RANK")  # of a run inside a pod
    for env, words in (
        ({"HORIZONML_RANKS": "3"}, "the first and the last rank"),
        ({"HOSTNAME": "laptop"}, "nothing numbers this pod"),
    ):
        with pytest.raises(IdentityError, match=words):
            identify({**elastic, **env})
    # A pod has as many cores as PET_NPROC_PER_NODE says, and one rank.
    trainer = {"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "4", "JOB_COMPLETION_INDEX": "1"}
    assert identify(trainer) == Identity(1, 3, "Kubeflow Trainer")
