"""The page of `horizonml up`, where nobody can press Enter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from horizonml.security.token import make_token
from tests.distributed.processes import environment, wait_for


def test_a_run_is_started_on_its_page_where_nobody_can_press_enter(tmp_path: Path, free_port: int) -> None:
    token = make_token()
    command = ["up", "digits", "--page", "--page-port", str(free_port), "--host", "127.0.0.1", "--port", "0"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "horizonml", *command, "--set", "epochs=1"],
            cwd=tmp_path, env=environment(HORIZONML_TOKEN=token.text), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_for(lambda: "ready: 1 device; start it on its page" in log.read_text(), "the device", 60)
            start = f"http://127.0.0.1:{free_port}/api/actions/start"
            request = Request(start, method="POST", headers={"Authorization": f"Bearer {token.text}"})
            with urlopen(request, timeout=10) as reply:
                assert reply.status == 200
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
    assert "digits is trained to the end" in log.read_text()
