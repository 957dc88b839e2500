"""Run programs for verifiers on other machines, each in bubblewrap on this machine.

For compute nodes whose kernel allows no user namespaces. Start this here and leave it running; set
reward.sandbox = "https://THIS_MACHINE:PORT" in the run's config. Both machines need the same file
~/.config/gapo_megatron/sandbox.pem, which the first start writes; with a shared home folder nothing
has to be copied. See docs/sandbox.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.sandbox import SYSTEM_PYTHON, Limits, SandboxError
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.rewards.sandbox.secret import make_secret
from gapo_tools.arguments import positive
from gapo_tools.sandboxes.server import Server

console = Console(stderr=True, markup=False)


def main() -> int:
    """1 no address or no secret, 2 no isolation here."""
    arguments = _parse()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, what it starts would have no end
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=console)])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # ten for every program
    seconds, default = arguments.max_total_s, Limits()
    largest = Limits(
        cpu_s=max(seconds, default.cpu_s), wall_s=max(seconds, default.wall_s), total_s=seconds
    )
    try:
        check_sandbox(sandbox="bubblewrap", python=arguments.python, limits=Limits())
        make_secret()
        server = Server(
            host=arguments.host,
            port=arguments.port,
            python=arguments.python,
            num_programs=arguments.num_programs,
            largest=largest,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    name = socket.getfqdn() if arguments.host in ("0.0.0.0", "::") else arguments.host
    name = f"[{name}]" if ":" in name else name
    print(f"https://{name}:{server.port}", flush=True)  # for a script
    console.print(
        f"serving {arguments.num_programs} programs at a time; in the run's config:\n"
        f'  reward.sandbox = "https://{name}:{server.port}"\nCtrl-C ends it',
        highlight=False,
    )
    # Ending this process ends every sandbox: there is nothing to tidy up, or to wait for.
    serving = threading.Thread(target=server.serve)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serving.start()
    serving.join()
    return 1


def _parse() -> argparse.Namespace:
    description, epilog = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(description=description, epilog=epilog)
    parser.add_argument("--port", type=int, required=True, help="0: any free port")
    parser.add_argument(
        "--host",
        default="0.0.0.0",
        help="address to listen on (default: all of this machine)",
    )
    parser.add_argument(
        "--num-programs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="programs at a time; others queue, without losing time (default: one per core, "
        "%(default)s)",
    )
    parser.add_argument(
        "--python",
        default=SYSTEM_PYTHON,
        metavar="PATH",
        help="Python that runs the programs (default: %(default)s)",
    )
    parser.add_argument(
        "--max-total-s",
        type=positive,
        default=600,
        metavar="S",
        help="largest reward.timeout_s that a run may ask for (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if not 0 <= arguments.port < 2**16:
        parser.error(f"--port ({arguments.port}) must be from 0 to 65535")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
