"""apex's FusedAdam, as far as Megatron-core takes it: no AMSGrad, CUDA graphs or master weights."""

from __future__ import annotations

from typing import Any

import torch

from apex.multi_tensor_apply import multi_tensor_applier


class FusedAdam(torch.optim.Optimizer):
    counts_steps_of_empty_groups = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or capturable or master_weights or not set_grad_none:
            raise RuntimeError("not of this stand-in")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode = int(adam_w_mode)
        # The real one has a master (None here) for every parameter it was made with, and passes
        # over parameters for which there is none.
        self.num_masters = [len(group["params"]) for group in self.param_groups]
        if not multi_tensor_applier.available:
            raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")
        import amp_C

        self.multi_tensor_adam = amp_C.multi_tensor_adam
        self.noop_flag = torch.zeros(1, dtype=torch.int32)

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group, num_masters in zip(self.param_groups, self.num_masters, strict=False):
            if not group["params"] and not self.counts_steps_of_empty_groups:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            lists: list[list[Any]] = [[], [], [], []]
            for p in group["params"][:num_masters]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p.data).float()
                    state["exp_avg_sq"] = torch.zeros_like(p.data).float()
                of_one = (p.grad.data, p.data, state["exp_avg"], state["exp_avg_sq"])
                for tensors, tensor in zip(lists, of_one, strict=True):
                    tensors.append(tensor)
            if lists[0]:
                multi_tensor_applier(
                    self.multi_tensor_adam,
                    self.noop_flag,
                    lists,
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    group["step"],
                    self.adam_w_mode,
                    1 if group["bias_correction"] else 0,
                    group["weight_decay"],
                )
