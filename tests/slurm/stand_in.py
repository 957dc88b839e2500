"""Takes the place of gapo_megatron/train.py in frozen code: a trainer as its launcher sees it.

Each rank prints what it was given and then does what STAND_IN says: `finish`, `stop`, `wait`,
`exit RANK CODE` or `kill RANK` (that rank ends so, the others wait).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

given = {k: v for k, v in os.environ.items() if k.startswith(("SLURM", "MASTER_", "GAPO_"))}
given |= {"argv": sys.argv[1:], "file": __file__, "names": sorted(os.environ)}
print(json.dumps(given), flush=True)
rank = os.environ["SLURM_PROCID"]
attempt_dir = Path(os.environ["GAPO_ATTEMPT_DIR"])
verb, *words = os.environ["STAND_IN"].split()
if verb in ("finish", "stop"):
    if rank == "0":
        (attempt_dir / "outcome").write_text({"finish": "finished\n", "stop": "stopped\n"}[verb])
        if verb == "finish":
            (attempt_dir.parents[1] / "finished.json").write_text('{"num_steps": 1000000}\n')
elif verb == "exit" and words[0] == rank:
    os._exit(int(words[1]))
elif verb == "kill" and words[0] == rank:
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(3600)
