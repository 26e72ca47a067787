"""Which groups may write into a folder: never one that is over, and always a job that is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonml.comm.expected import instance, plain
from horizonml.errors import CheckpointError, PeerLost
from horizonml.state.checkpoint import FoundCheckpoints
from horizonml.state.runfolder import Fence, Term
from horizonml.state.saver import clean


def fence(folder: Path, term: Term, word: str = "") -> Fence:
    """What a group that formed with this term has in its hands, whether it has begun or not."""
    found = Fence(folder)
    found.term, found.word = term, word or f"word{term.generation}"
    return found


def test_terms_follow_generations_and_count_the_starts_of_a_job() -> None:
    assert Term.after([], 0) == Term(0, 0)
    assert Term.after([None, Term(0, 3), Term(0, 2)], 4) == Term(0, 4)
    assert Term.after([Term(0, 3)], 1) == Term(1, 1)  # by a new service, which counts from the beginning
    assert Term.after([Term(2, 5), Term(0, 9)], 7) == Term(2, 7)


def test_what_a_rank_has_found_in_the_folder_is_checked() -> None:
    found = FoundCheckpoints("0" * 32, Term(1, 2), 3)
    assert instance(FoundCheckpoints)(plain(found)) == found
    for wrong in (
        3,
        [1],
        {"restarts": 1},
        *({"restarts": a, "generation": b} for a, b in ((1, "2"), (True, 1), (0, -1), (0, 10**30))),
    ):
        with pytest.raises(ValueError, match="term"):
            instance(FoundCheckpoints)(plain(found) | {"term": wrong})
    with pytest.raises(ValueError, match="token"):
        instance(FoundCheckpoints)(plain(found) | {"token": "../x"})


def test_a_group_that_is_over_may_neither_begin_nor_write(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    old, late, new = (fence(folder, Term(0, generation)) for generation in (1, 2, 3))
    old.begin()
    old.check()
    ahead = fence(folder, Term(1, 1))
    new.begin()
    with pytest.raises(CheckpointError, match=r"generation 3 has begun in .*, and generation 1, which is over"):
        old.check()
    with pytest.raises(PeerLost, match=r"generation 3 has begun in .*, and generation 2, which is over"):
        late.begin()
    with pytest.raises(PeerLost, match="generation 3 has begun"):  # a second group of the same number
        fence(folder, Term(0, 3), "other").begin()
    with pytest.raises(PeerLost, match="generation 3 has begun"):  # its job was new when it formed, and is not now
        ahead.begin()
    fence(folder, Term(0, 3)).begin()  # another member of the group, which did not know that it shares the folder
    new.check()
    assert [path.name for path in folder.iterdir()] == [".generation-0-3-word3"]


def test_leftovers_are_removed_but_nothing_that_was_finished(tmp_path: Path) -> None:
    for name in (".step-00000009-g1-abc", "step-00000004", ".old-step-00000004", ".old-step-00000003", ".gone-x-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text(name)
    clean(tmp_path, "word")
    left = {path.name: (path / "checkpoint.json").read_text() for path in tmp_path.iterdir()}
    # The checkpoint of step 3 had been moved out of the way for another one, which never came.
    assert left == {"step-00000003": ".old-step-00000003", "step-00000004": "step-00000004"}
