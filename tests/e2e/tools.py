"""What the end-to-end tests need: commands with deadlines, and questions to Prometheus.

Environment variables adapt them to the machine: DOCKER_BUILD and COMPOSE (other commands for `docker build` and
`docker compose`), KIND_DOCKER_HOST, KIND_KUBECONFIG and KIND_PATH (another Docker daemon for kind), and those of the
Makefile (KIND_NODE_IMAGE, KIND_CONFIG, PROMETHEUS_IMAGE).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "horizonml/worker:dev"
USER = 10001
PATIENCE = 3  # limits are for four cores to itself; what hangs does so for a little longer on a machine with less
DASHBOARDS = [ROOT / "grafana" / "dashboards" / f"{name}.json" for name in ("overview", "faults", "time", "devices")]
# As Grafana fills them in at a scrape every 15 s.
VARIABLES = {
    "__rate_interval": "60s",
    "__interval": "15s",
    "__range": "5m",
    "rank": ".*",
    "namespace": ".*",
    "job": ".*",
}


def run(
    *command: str,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    both: bool = False,
    stdin: str | None = None,
) -> str:
    """What a command prints (with `both`, its errors too); it must end well and in time."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE,
        text=True,
        timeout=PATIENCE * timeout,
        check=False,
    )
    shown = f"{result.stdout[-4000:]}{(result.stderr or '')[-4000:]}"
    assert not check or result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}:\n{shown}"
    return result.stdout


def wait_for(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    """The first result of `condition` that is true."""
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s (last: {found!r})"
        time.sleep(1)


Query = Callable[[str], list[dict[str, Any]]]


def prometheus_at(url: str) -> Query:
    """Asks the Prometheus at a URL for the current value of an expression."""

    def query(expression: str) -> list[dict[str, Any]]:
        address = f"{url}/api/v1/query?query={urllib.parse.quote(expression)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                answer = json.load(response)
        except OSError:
            return []
        assert answer["status"] == "success", f"{expression}: {answer}"
        return list(answer["data"]["result"])

    return query


def value(query: Query, expression: str) -> float | None:
    """The value of an expression that gives one number, or None."""
    found = query(expression)
    return float(found[0]["value"][1]) if found else None


def panel_queries() -> Iterator[tuple[str, str, str]]:
    """Dashboard, panel and expression of every query, with Grafana's variables filled in for all ranks."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        panels = list(dashboard["panels"])
        for panel in panels:
            panels += panel.get("panels", [])
            for target in panel.get("targets", []):
                expression = target["expr"]
                for name, filled in VARIABLES.items():
                    expression = re.sub(rf"\$\{{?{name}(:\w+)?\}}?", filled, expression)
                assert "$" not in expression, f"{path.name}: {panel['title']}: {expression}"
                yield path.stem, panel["title"], expression


# A container may not read the counters of energy; only automatic plans are compared with a forecast; a rank alone in
# its stage has no gradients to compare; once all ranks are there, nobody waits for one; what faults cost is seen after
# one only, and replicas only where a rank is alone in its stage.
MAY_BE_EMPTY = (
    "horizonml_energy_joules",
    "horizonml_slowdown_ratio",
    "horizonml_plan_step_seconds",
    "horizonml_gradient_divergence",
    "horizonml_waiting_for_rank",
    "horizonml_loss_notice_seconds",
    "horizonml_recovery_seconds",
    "horizonml_replica",
    "horizonml_plan_memory_bytes",  # of automatic plans
    "horizonml_gradient_norm",  # of gradients that are clipped
    "horizonml_replans",  # of automatic plans
    "horizonml_local_steps",  # of jobs with local steps
    "horizonml_accelerator",  # of ranks on an accelerator
)


def empty_panels(query: Query) -> list[str]:
    """The queries of all dashboards that this Prometheus has no data for, but ought to have."""
    return [
        f"{dashboard}: {title}: {text}"
        for dashboard, title, text in panel_queries()
        if not any(metric in text for metric in MAY_BE_EMPTY) and not query(text)
    ]
