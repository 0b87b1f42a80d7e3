"""What one does with a server at a terminal.

python -m deployments chat                       # talk to a running server
python -m deployments doctor deployments.yaml    # what stands in the way of one, and what to do
"""

import argparse
import sys

from deployments import chat, doctor


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m deployments")
    commands = parser.add_subparsers(required=True)
    for command in (chat, doctor):
        name = command.__name__.rpartition(".")[2]
        described = (command.__doc__ or "").splitlines()[0]
        one = commands.add_parser(name, help=described, description=described)
        command.add_arguments(one)
        one.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
