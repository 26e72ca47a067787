"""Writes the scalars of a run as TensorBoard's event files, with the writer of the package `tensorboard` itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from horizonml.telemetry.fields import Point
from horizonml.telemetry.run_info import RunInfo

_DT_STRING = 7  # of TensorFlow's types


class TensorBoardSink:
    """Writes one event file into a folder, which may have files of earlier groups of the same run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def describe(self, run: RunInfo) -> None:
        """Show the job and the plan as text."""
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for name in ("job", "plan"):
            text = f"```json\n{json.dumps(run.to_json()[name], indent=2)}\n```"
            tensor = TensorProto(dtype=_DT_STRING, string_val=[text.encode()])
            summary = Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])
            self._writer.add_event(Event(wall_time=run.time, step=run.resumed_at, summary=summary))

    def write(self, points: Sequence[Point]) -> None:
        """Write one event for each point."""
        for point in points:
            if point.begins and point.step:
                # TensorBoard then forgets the steps after it that an earlier group had done.
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=point.time, step=point.step + 1, session_log=start))
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """Close the file."""
        self._writer.close()
