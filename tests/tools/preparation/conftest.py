"""The command on a model's folder of its own."""

from __future__ import annotations

import pytest

from tests.prepare_data_setup import put_tokenizer, runner


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    return put_tokenizer(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def run(tmp_path, hf_dir, monkeypatch):
    return runner(tmp_path, hf_dir, monkeypatch)
