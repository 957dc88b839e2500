"""The mailbox on a real store."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from gapo_megatron.errors import ConfigError, MachineError
from gapo_megatron.run.mailbox import Mailbox
from tests.messages import mentions


def test_any_bytes_arrive_until_they_are_erased_or_taken() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, None, is_master=False, wait_for_workers=False)
    trainer, generation = (Mailbox(dist.PrefixStore("mail", one)) for one in (store, client))
    assert generation.look("order/0") is None
    for number, value in enumerate((b"", b"\x00\xff", b" ", b"x" * 100_000)):
        trainer.post(f"order/{number}", value)
        assert generation.look(f"order/{number}") == value
    trainer.erase("order/0")
    assert generation.look("order/0") is None
    assert generation.take("order/1") == b"\x00\xff" and trainer.look("order/1") is None
    with pytest.raises(MachineError, match="order/1"):
        generation.take("order/1")
    # A longer one is refused before it is sent: the store would close the connection, as if its
    # process had exited.
    longest = 8 * 2**20
    with pytest.raises(ConfigError, match=mentions("order/4", longest + 1, longest)):
        trainer.post("order/4", bytes(longest + 1))
    trainer.post("order/5", bytes(longest))
    assert generation.look("order/5") == bytes(longest)
