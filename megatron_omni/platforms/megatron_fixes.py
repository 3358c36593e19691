"""Faults of megatron-core 0.16 to 0.19 without Transformer Engine and Apex, mended on every device."""

import os
import warnings
from functools import cache
from types import ModuleType

import torch

from megatron_omni.platforms.import_hook import after_import

_WARNINGS_OF_ITS_OWN_CODE = (
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)


@cache
def install() -> None:
    """Mend each faulty module as soon as it is imported."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's wish, with tensor parallelism
    for message in _WARNINGS_OF_ITS_OWN_CODE:
        warnings.filterwarnings("ignore", message)
    after_import("megatron", _mend)


def _mend(module: ModuleType) -> None:
    if module.__name__ in _MENDERS:
        _MENDERS[module.__name__](module)


def _mend_moe_utils(module: ModuleType) -> None:
    """0.16 leaves the name undefined without Transformer Engine and then tests it against None."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _mend_distributed_optimizer(module: ModuleType) -> None:
    """Checkpoints of DistributedOptimizer over torch.optim.Adam.

    As shipped, loading into a fresh optimizer asserts, and the saved step is either missing (KeyError) or
    silently replaced by the local one, which makes Adam's bias correction wrong.
    """
    if module.HAVE_APEX_OR_TE:
        return
    optimizer_class = module.DistributedOptimizer
    state_dict, load_state_dict = optimizer_class.state_dict, optimizer_class.load_state_dict

    def state_dict_of_fresh_optimizer(self):
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    self.optimizer.state[param] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return state_dict(self)

    def load_state_dict_with_own_steps(self, saved):
        """As shipped, all parameters share one step tensor, which Adam then counts up for each of them."""
        load_state_dict(self, saved)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def set_main_param_and_states_but_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        main_param.copy_(tensors["param"])
        state = self.optimizer.state[main_param]
        for name in state.keys() & tensors.keys() - {"step"}:
            state[name].copy_(tensors[name])

    optimizer_class.state_dict = state_dict_of_fresh_optimizer
    optimizer_class.load_state_dict = load_state_dict_with_own_steps
    optimizer_class._set_main_param_and_optimizer_states = set_main_param_and_states_but_step


_MENDERS = {
    "megatron.core.transformer.moe.moe_utils": _mend_moe_utils,
    "megatron.core.optimizer.distrib_optimizer": _mend_distributed_optimizer,
}
