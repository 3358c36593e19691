"""Adam in host memory, for devices too small for its state."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class HostAdam(torch.optim.Optimizer):
    """AdamW that keeps float32 master weights and moments in host memory, and updates them there.

    Takes the place of Megatron's `HybridDeviceOptimizer`, which takes CUDA parameters only. As Megatron's
    distributed optimizer asks of that one, parameters are this rank's shards on the device, gradients come in
    their `decoupled_grad`, and a step copies the new weights back.
    """

    def __init__(self, params: list, lr: float, weight_decay: float, betas: tuple, eps: float, **_: Any):
        """`_`: what part to keep where, of no concern here."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.staging: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for shard in group["params"]:
                if shard not in self.staging:
                    self.staging[shard] = _on_host(shard)
                self.staging[shard].copy_(shard.decoupled_grad, non_blocking=True)
        _synchronize()
        for group in self.param_groups:
            params = group["params"]
            states = [self.host_state(shard) for shard in params]
            adamw(
                [state["master_param"] for state in states],
                [self.staging[shard] for shard in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for shard, state in zip(params, states, strict=True):
                shard.copy_(state["master_param"], non_blocking=True)

    @torch.no_grad()
    def host_state(self, shard: Tensor) -> dict[str, Tensor]:
        """Master, moments and step of a parameter; made when first asked for."""
        state = self.state[shard]
        if not state:
            state["master_param"] = _on_host(shard).copy_(shard)
            state["exp_avg"] = torch.zeros(shard.shape)
            state["exp_avg_sq"] = torch.zeros(shard.shape)
            state["step"] = torch.zeros(())
        return state

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Take the masters anew from the weights. Megatron's name for it."""
        for group in self.param_groups:
            for shard in group["params"]:
                self.host_state(shard)["master_param"].copy_(shard)


def _on_host(shard: Tensor) -> Tensor:
    """An uninitialised float32 tensor that the device can copy to and from without a detour."""
    return torch.empty(shard.shape, dtype=torch.float32, pin_memory=shard.device.type != "cpu")


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
