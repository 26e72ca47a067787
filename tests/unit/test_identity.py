import pytest

from horizonml.errors import IdentityError
from horizonml.rendezvous.identity import identify

SOURCES = [
    ("RANK", {"RANK": "2", "WORLD_SIZE": "5"}),
    ("StatefulSet", {"POD_INDEX": "2", "WORLD_SIZE": "5"}),
    ("StatefulSet", {"HOSTNAME": "worker-2", "WORLD_SIZE": "5"}),
    ("horovodrun", {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "5"}),
    ("Open MPI", {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "5"}),
    ("MVAPICH", {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "5"}),
    ("PMI", {"PMI_RANK": "2", "PMI_SIZE": "5"}),
    ("PMIx", {"PMIX_RANK": "2", "SLURM_NTASKS": "5"}),
    ("Slurm", {"SLURM_PROCID": "2", "SLURM_NTASKS": "5", "SLURM_STEP_ID": "0"}),
]


@pytest.mark.parametrize(
    ("source", "env"), SOURCES, ids=[f"{name}-{len(env)}-{i}" for i, (name, env) in enumerate(SOURCES)]
)
def test_each_source_gives_rank_and_world_size(source: str, env: dict[str, str]) -> None:
    found = identify({**env, "HOME": "/root"})
    assert found is not None
    assert (found.rank, found.world_size, found.source) == (2, 5, source)


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_first_source_wins(first: int) -> None:
    env: dict[str, str] = {}
    for name, other in reversed(SOURCES[first:]):
        rank_of = {
            key: "1" if key not in ("WORLD_SIZE",) and "SIZE" not in key and "NTASKS" not in key else "9"
            for key in other
        }
        env.update(rank_of if name != SOURCES[first][0] else {})
    env.pop("HOSTNAME", None)
    env.update(SOURCES[first][1])
    found = identify(env)
    assert found is not None
    assert (found.rank, found.source) == (2, SOURCES[first][0])


def test_a_pod_index_comes_before_the_host_name() -> None:
    found = identify({"POD_INDEX": "1", "HOSTNAME": "worker-3", "WORLD_SIZE": "5"})
    assert found is not None
    assert found.rank == 1


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"HOSTNAME": "worker-2"},
        {"WORLD_SIZE": "5", "HOSTNAME": "laptop"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    ],
)
def test_nothing_found_is_alone(env: dict[str, str]) -> None:
    assert identify(env) is None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1"}, "RANK is set (1) but WORLD_SIZE is not"),
        ({"RANK": "5", "WORLD_SIZE": "5"}, "ranks go from 0 to 4"),
        ({"RANK": "x", "WORLD_SIZE": "5"}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"HOSTNAME": "worker-7", "WORLD_SIZE": "5"}, "ranks go from 0 to 4"),
        ({"PMIX_RANK": "1"}, "SLURM_NTASKS is not"),
    ],
)
def test_contradictions_are_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(IdentityError, match=words.replace("(", r"\(").replace(")", r"\)")):
        identify(env)
