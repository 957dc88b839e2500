"""`gapo_megatron.train` on a rank that signals itself when it enters a stage, whatever the clock.

Of the environment: STAGE ("step 3: update"), SIGNAL (a name), and SIGNALLED_RANK (default 0).
"""

from __future__ import annotations

import os
import signal

import gapo_megatron.train
from gapo_megatron.run.attempt import Attempt


def _enter(self: Attempt, stage: str) -> None:
    entered(self, stage)
    rank = int(os.environ.get("RANK", "0"))
    if stage == os.environ["STAGE"] and rank == int(os.environ.get("SIGNALLED_RANK", "0")):
        os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])


if __name__ == "__main__":
    entered, Attempt.enter = Attempt.enter, _enter  # type: ignore[method-assign]
    gapo_megatron.train.main()
