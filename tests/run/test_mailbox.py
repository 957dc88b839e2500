"""The mailbox on a real store, with a foreign process connected to the same port."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from gapo_megatron.errors import ConfigError, MachineError
from gapo_megatron.run.mailbox import Mailbox, shared_secret
from tests.messages import mentions


class Job:
    """A job's store with a mailbox at both ends, and a foreign connection to it."""

    def __init__(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        clients = [
            dist.TCPStore("127.0.0.1", store.port, None, is_master=False, wait_for_workers=False)
            for _ in range(2)
        ]
        self.trainer = Mailbox(dist.PrefixStore("mail", store), b"secret")
        self.generation = Mailbox(dist.PrefixStore("mail", clients[0]), b"secret")
        self.stranger = clients[1]

    def captured(self, name: str) -> bytes:
        """Stored bytes of a message."""
        value: bytes = self.stranger.get(f"mail/{name}")
        return value

    def forge(self, name: str, value: bytes) -> None:
        self.stranger.set(f"mail/{name}", value)  # type: ignore[arg-type]


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"\x00\xff" * 300, b"0" * 64, b"0" * 64 + b" ", b"0" * 64 + b" {}"]
)
@pytest.mark.parametrize("name", ["stop", "answer/3"])
def test_what_a_stranger_writes_is_refused(job: Job, name: str, value: bytes) -> None:
    job.forge(name, value)
    for mail in (job.trainer, job.generation):
        with pytest.raises(MachineError, match=mentions(name, "MASTER_PORT")):
            mail.look(name)


def test_a_message_holds_under_its_own_name_alone(job: Job) -> None:
    """An old message replayed as the next, or an order as an answer, is refused."""
    job.trainer.post("order/3", b"{}")
    for name in ("order/4", "answer/3", "stop"):
        job.forge(name, job.captured("order/3"))
        with pytest.raises(MachineError, match=name):
            job.generation.look(name)
    assert job.generation.look("order/3") == b"{}"


def test_a_message_of_another_launch_is_refused(job: Job) -> None:
    earlier = Mailbox(dist.PrefixStore("mail", job.stranger), b"its own secret")
    earlier.post("stop", b"")
    with pytest.raises(MachineError, match="stop"):
        job.generation.look("stop")


def test_a_damaged_message_is_refused(job: Job) -> None:
    job.trainer.post("order/0", b"weights")
    sealed = job.captured("order/0")
    for at in range(len(sealed)):
        job.forge("order/0", sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
        with pytest.raises(MachineError, match="order/0"):
            job.generation.look("order/0")
    for damaged in (sealed[:-1], sealed + b"x"):
        job.forge("order/0", damaged)
        with pytest.raises(MachineError, match="order/0"):
            job.generation.look("order/0")


def test_any_bytes_arrive_beside_a_strangers(job: Job) -> None:
    job.forge("order/9", b"garbage")
    for number, value in enumerate((b"", b"\x00\xff", b" ", b"x" * 100_000)):
        job.trainer.post(f"order/{number}", value)
        assert job.generation.look(f"order/{number}") == value
    job.trainer.erase("order/0")
    assert job.generation.look("order/0") is None


def test_a_message_longer_than_the_store_takes_is_refused_before_it_is_sent(job: Job) -> None:
    """Otherwise the store closes the connection, as if its process had exited."""
    longest = 8 * 2**20 - len(b"0" * 64 + b" ")
    with pytest.raises(ConfigError, match=mentions("facts/0", 8 * 2**20 + 1, 8 * 2**20)):
        job.trainer.post("facts/0", bytes(longest + 1))
    job.trainer.post("facts/1", bytes(longest))
    assert job.trainer.look("facts/1") == bytes(longest)


def test_a_message_that_somebody_removed_is_named(job: Job) -> None:
    job.trainer.post("facts/2", b"{}")
    job.trainer.post("facts/5", b"{}")
    job.stranger.delete_key("mail/facts/2")
    with pytest.raises(MachineError, match="facts/2"):
        job.generation.take("facts/2")
    assert job.generation.take("facts/5") == b"{}" and job.trainer.look("facts/5") is None


def test_the_secret_is_in_a_file_of_this_user_alone_until_all_have_it(tmp_path: Path) -> None:
    store = dist.HashStore()
    with shared_secret(store, tmp_path, rank=0) as secret:
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == secret
        with shared_secret(store, tmp_path, rank=1) as same:
            assert same == secret
    assert not list(tmp_path.iterdir())
    with shared_secret(dist.HashStore(), tmp_path, rank=0) as another:
        assert another != secret


def test_the_secret_of_a_rank_0_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / f".mailbox_{'0' * 32}").touch(0o600)
    users = tmp_path / ".mailbox_notes"
    users.touch()
    with shared_secret(dist.HashStore(), tmp_path, rank=0):
        (path,) = set(tmp_path.iterdir()) - {users}
        assert path.name != f".mailbox_{'0' * 32}"
    assert list(tmp_path.iterdir()) == [users]


@pytest.mark.parametrize("number", ["../secret", "", "0" * 31])
def test_a_strangers_word_for_the_secrets_file_opens_none(tmp_path: Path, number: str) -> None:
    store = dist.HashStore()
    store.set("gapo_megatron/secret", number)
    with (
        pytest.raises(MachineError, match="gapo_megatron/secret"),
        shared_secret(store, tmp_path, rank=1),
    ):
        pass


def test_a_file_of_the_secret_that_is_not_there_is_named(tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set("gapo_megatron/secret", "0" * 32)
    with (
        pytest.raises(MachineError, match=f"{tmp_path}/.mailbox_0000"),
        shared_secret(store, tmp_path, rank=1),
    ):
        pass
