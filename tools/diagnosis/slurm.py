"""Section `slurm`: client, cluster, and settings that affect a run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from gapo_megatron.launch.node_checks import CommandError, run_command
from gapo_tools.diagnosis.finding import Finding, judge

TESTED = "22.05"
"""Version of Slurm that tests/slurm ran on."""


def look_at_slurm(env: Mapping[str, str]) -> Iterator[Finding]:
    """Check client and cluster; there is a finding `cluster` only if there is a cluster."""
    if shutil.which("sbatch") is None:
        advice = "without Slurm, run a batch file locally: bash slurm/gapo_demo.sbatch"
        yield Finding("slurm", "client", "warn", "sbatch was not found", advice)
        return
    try:
        text = run_command("scontrol", "show", "config")
        shown = run_command("sinfo", "--noheader", "--format=%P %D %G %l")
    except CommandError as error:
        # Slurm that is installed but not configured is not broken.
        told = "SLURM_CONF" in env or Path("/etc/slurm/slurm.conf").exists()
        advice = "no cluster answers: is this a login node, and is SLURM_CONF right?"
        yield Finding("slurm", "client", "fail" if told else "warn", str(error), advice)
        return
    settings = dict(re.findall(r"^(\S+) += (.*?) *$", text, re.MULTILINE))
    detail = f"{settings['ClusterName']}, Slurm {settings['SLURM_VERSION']}; tested on {TESTED}"
    yield Finding("slurm", "cluster", "ok", detail)
    partitions = [line.split(maxsplit=3) for line in shown.splitlines()]
    detail = "; ".join(f"{p}: {n} nodes of {gres}, limit {t}" for p, n, gres, t in partitions)
    yield Finding("slurm", "partitions", "ok", detail)
    yield from judge_settings(settings)
    yield _munge(settings)


def judge_settings(settings: Mapping[str, str]) -> Iterator[Finding]:
    """What the settings of `scontrol show config` mean for restarts."""
    requeue = settings["JobRequeue"] == "1"
    advice = "sbatch --requeue asks for it; if Slurm refuses, submit the same command again"
    yield judge("slurm", "requeue", requeue, f"JobRequeue={requeue:d}", advice, bad="warn")
    mode, parameters = settings["PreemptMode"], settings["SlurmctldParameters"]
    warned = mode == "OFF" or "preempt_send_user_signal" in parameters
    detail = f"PreemptMode={mode}, " + ("with" if warned else "no preempt_send_user_signal")
    detail = detail if mode != "OFF" else "PreemptMode=OFF"
    advice = "preempted jobs get no time to save: lower checkpoint.every_steps"
    yield judge("slurm", "preemption", warned, detail, advice, bad="warn")
    expire = re.search(r"cred_expire=(\d+)", settings["AuthInfo"])
    wait = f"a requeued job starts again after {int(expire[1]) if expire else 120} s"
    yield Finding("slurm", "restart", "ok", wait)
    kind = settings["AccountingStorageType"]
    advice = f"without sacct, Slurm forgets a job {settings['MinJobAge']} after its end"
    yield judge("slurm", "accounting", not kind.endswith("none"), kind, advice, bad="warn")


def _munge(settings: Mapping[str, str]) -> Finding:
    kind = settings["AuthType"]
    if kind != "auth/munge":
        return Finding("slurm", "authentication", "ok", kind)
    found = re.search(r"socket=([^,]+)", settings["AuthInfo"])
    socket = f"--socket={found[1]}" if found else ""
    try:
        said = run_command("sh", "-c", f"munge -n {socket} | unmunge {socket}")
    except CommandError as error:
        return Finding("slurm", "authentication", "fail", str(error), "munged must run here")
    return Finding("slurm", "authentication", "ok", " ".join(said.splitlines()[0].split()))
