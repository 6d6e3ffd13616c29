"""Import each module of ours alone, and print those that fail; run in a process of its own.

One interpreter per module would load torch and Flower hundreds of times. Here others' modules stay
loaded, and ours are forgotten before each import, so that a module finds nothing that another one
has imported before it.
"""

import importlib
import json
import sys
import traceback

OURS = ("gems_flwr", "simulations")


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]


def main(names):
    failed = {}
    for name in names:
        forget()
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = traceback.format_exception_only(error)[-1].strip()
    print(json.dumps(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
