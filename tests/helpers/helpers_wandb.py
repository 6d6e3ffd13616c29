"""Reading what W&B leaves on disk, with its own message types.

A ``.wandb`` file is a LevelDB log: after 7 bytes that say what it is, blocks of 32 KiB with chunks
of checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last) and content.
"""

import json
import struct

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEAD = 32768, 7


def wandb_records(path):
    """Yield the records of a file, as W&B's own protobuf messages."""
    data, position, parts = path.read_bytes(), _HEAD, b""
    while position + _HEAD <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _HEAD:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEAD])
        position += _HEAD
        parts = (b"" if kind in (1, 2) else parts) + data[position : position + length]
        position += length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def _values(items):
    return {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}


def wandb_run(path):
    """Return id, name, config, rows by step, summary and exit status of a run."""
    run = {"rows": {}, "summary": {}}
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run |= {"id": record.run.run_id, "name": record.run.display_name}
            run |= {"host": record.run.host, "config": _values(record.run.config.update)}
        elif kind == "history":
            row = _values(record.history.item)
            run["rows"][row["_step"]] = {k: v for k, v in row.items() if not k.startswith("_")}
        elif kind == "summary":
            run["summary"] |= _values(record.summary.update)
        elif kind == "exit":
            run["exit"] = record.exit.exit_code
    return run
