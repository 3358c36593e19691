"""Rollout on vLLM-Omni: engines in processes of their own, which are given the trainer's weights."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError
from megatron_omni.parallel.peers import meet
from megatron_omni.parallel.state import Layout
from megatron_omni.platforms import current_platform
from megatron_omni.rollout.base import RolloutRequest, Trajectory
from megatron_omni.rollout.parts import EngineParts
from megatron_omni.rollout.vllm_omni.client import EngineClient, EngineLostError, Health, HeldWeights
from megatron_omni.rollout.vllm_omni.process import EngineProcess, Host, RunningEngine
from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.rollout.vllm_omni.transport import PushResult, Sender, TransportError, open_sender, push
from megatron_omni.rollout.vllm_omni.transport.background import in_background

HEARTBEAT = 5.0
"""Seconds between two words of a replica's leader to the processes that wait for it."""
RECOVERY = 3
"""Times `rollout_timeout` that one recovery may take: to notice, to start the engine, and to sample again."""
BASE = "base"
"""Version of the weights that adapters are sent to."""
SHOWN_NAMES = 12
Sample = dict[str, np.ndarray]
logger = logging.getLogger(__name__)


class VllmOmniEngine:
    """A `RolloutEngine` whose samples are drawn by one or several engine servers a replica.

    One process of each replica talks to them and hands the samples to the others. A request and its seeds
    give the trajectory that sampling in place gives, but for rounding.

    An engine that dies, hangs or forgets its weights is started anew (or waited for, where it runs by
    itself), given the weights, and asked again for what it had not answered; so nothing is lost. Raises
    `UserError` on all processes of the replica when that happens too often without a sample in between.
    """

    samples_policy = True

    def __init__(self, parts: EngineParts):
        config = parts.config
        self.parts = parts
        self.config, self.layout, self.weights = config, parts.layout, parts.weights
        self.micro_batch_size = config.training.micro_batch_size
        self.weight_version = 0
        self.meetings = 0
        self.dtype = torch.bfloat16 if config.model.bf16 else torch.float32
        places = running_engines(config, self.layout) or own_devices(config, self.layout)
        self.engines = range(len(places))
        self.links: list[Link] = []
        if self.layout.leads_replica:
            self.links = [Link(open_host(place, config), config, self.layout.device) for place in places]

    def generate(self, requests: list[RolloutRequest]) -> Iterator[Trajectory]:
        current_platform().empty_cache()  # an engine is about to wake on these devices
        self._send_weights(self._while_leader(self._out_of_date))
        size = self.micro_batch_size
        batches = [range(start, min(start + size, len(requests))) for start in range(0, len(requests), size)]
        drawing = Drawing(self.links, [self._sample_request(r) for r in requests], self.weight_version)
        try:
            for batch in batches:
                while lost := self._while_leader(lambda batch=batch: drawing.wait(batch)):
                    self._send_weights(lost)
                    drawing.resume()
                answered = [requests[index] for index in batch]
                samples = [drawing.samples[index].result() for index in batch] if self.links else []
                yield self._share(self._trajectory(answered, samples) if samples else None)
        finally:
            drawing.close()
        self._while_leader(self._rest)
        self._meet_replicas()

    def update_weights(self, version: int) -> None:
        self.weight_version = version
        self.weights.gather()
        current_platform().empty_cache()
        self._send_weights(list(self.engines))
        self._meet_replicas()

    def metrics(self) -> dict[str, float]:
        taken = {
            "rollout/engine_restarts": float(sum(link.restarts for link in self.links)),
            "rollout/weight_gib_sent": sum(link.sent_bytes for link in self.links) / 2**30,
        }
        for link in self.links:
            link.restarts = link.sent_bytes = 0
        return taken

    def close(self) -> None:
        if self.links:
            self._of_all(Link.close)

    def _meet_replicas(self) -> None:
        """A replica whose engine was lost may take longer than the others would wait in a collective."""
        if self.layout.data_size > 1:
            self.meetings += 1
            settings = self.config.vllm_omni
            meet(self.meetings, RECOVERY * (1 + settings.rollout_restarts) * settings.rollout_timeout)

    def _out_of_date(self) -> list[int]:
        """Numbers of the engines that do not hold the current weights."""
        held = self._of_all(lambda link: link.holds(self.weight_version))
        return [number for number, current in enumerate(held) if not current]

    def _rest(self) -> None:
        self._of_all(Link.rest)

    def _of_all(self, function: Callable[["Link"], Any]) -> list[Any]:
        """What it returns for each link, asked at the same time."""
        with ThreadPoolExecutor(len(self.links)) as threads:
            return list(threads.map(function, self.links))

    def _send_weights(self, engines: list[int]) -> None:
        """Until these engines hold the current weights. Collective over the replica."""
        for engine in engines:
            while not self._try_to_send(engine):
                pass

    def _try_to_send(self, engine: int) -> bool:
        ready, has_base = self._while_leader(lambda: self.links[engine].ready_for_weights())
        if not ready:
            return False
        if self.config.vllm_omni.lora_transfer == "merged":
            return self._send(engine, self.weights.model(), self.weight_version)
        return (has_base or self._send(engine, self.weights.base(), BASE)) and self._send(
            engine, self.weights.adapters(), self.weight_version, adapter=True
        )

    def _send(
        self, engine: int, tensors: Iterator[tuple[str, Tensor]], version: int | str, adapter: bool = False
    ) -> bool:
        sent = Future()
        if self.links:
            sent = completed(self.links[engine].send, tensors, version, self.dtype, adapter)
        for _ in tensors:
            pass  # the other processes take part in gathering, and so does the leader after a failure
        return self._from_leader(sent)

    def _while_leader(self, function: Callable[[], Any]) -> Any:
        """`_from_leader` of a function without collectives, however long it takes."""
        work = in_background(function) if self.links else Future()

        def goes_on() -> bool:
            return bool(self.links and wait([work], HEARTBEAT).not_done)

        while self.layout.from_leader(goes_on()):
            pass  # processes that heard nothing for distributed_timeout_minutes would give up
        return self._from_leader(work)

    def _from_leader(self, work: Future) -> Any:
        """What the leader's work returned or, of `UserError`s, raised, on all processes of the replica."""
        outcome = error = None
        if self.links:
            try:
                outcome = work.result()
            except UserError as failure:
                error = str(failure)
        outcome, error = self.layout.from_leader((outcome, error))
        if error is not None:
            raise UserError(error)
        return outcome

    def _sample_request(self, request: RolloutRequest) -> SampleRequest:
        rollout = self.config.rollout
        return SampleRequest(
            prompt=request.prompt,
            negative_prompt=rollout.negative_prompt,
            seed=request.seed,
            noise_seed=request.initial_seed,
            height=rollout.height,
            width=rollout.width,
            num_inference_steps=rollout.num_inference_steps,
            sde_type=rollout.sde_type,
            noise_level=rollout.noise_level,
            true_cfg_scale=rollout.true_cfg_scale,
            window=request.window,
            trained=request.trained,
            record_means=request.record_means,
        )

    def _trajectory(self, requests: list[RolloutRequest], samples: list[Sample]) -> Trajectory:
        def stacked(name: str) -> Tensor:
            return torch.from_numpy(np.stack([sample[name] for sample in samples])).to(self.layout.device)

        log_probs = stacked("log_probs")
        return Trajectory(
            prompts=[request.prompt for request in requests],
            prompt_id=torch.tensor([request.prompt_id for request in requests]),
            seeds=torch.tensor([request.seed for request in requests]),
            clean_latents=stacked("clean_latents"),
            latents=stacked("latents"),
            next_latents=stacked("next_latents"),
            sigmas=stacked("sigmas"),
            next_sigmas=stacked("next_sigmas"),
            log_probs=log_probs,
            images=stacked("image").cpu(),
            weight_version=self.weight_version,
            old_log_probs=None if self.config.vllm_omni.recompute_log_probs else log_probs,
            means=stacked("means") if requests[0].record_means else None,
        )

    def _share(self, trajectory: Trajectory | None) -> Trajectory:
        """The leader's trajectory, on all processes of the replica."""
        if self.layout.world_size == self.layout.data_size:
            return trajectory
        empty = None
        if trajectory:
            hollow = {
                f.name: (value.shape, value.dtype, value.device.type)
                for f in fields(trajectory)
                if isinstance(value := getattr(trajectory, f.name), Tensor)
            }
            empty = hollow, replace(trajectory, **dict.fromkeys(hollow))
        hollow, shared = self.layout.from_leader(empty)
        for name, (shape, dtype, device) in hollow.items():
            if trajectory:
                tensor = getattr(trajectory, name)
            else:
                device = self.layout.device if device != "cpu" else device
                tensor = torch.empty(shape, dtype=dtype, device=device)
            setattr(shared, name, self.layout.broadcast_in_replica(tensor))
        return shared


class Link:
    """One engine, and what this process sends to it."""

    def __init__(self, host: Host, config: Config, device: torch.device):
        self.host, self.config, self.device = host, config, device
        self.settings = config.vllm_omni
        self.patience = 30 * config.parallel.distributed_timeout_minutes
        """Seconds that the other processes may wait in a collective: half of what they would."""
        self.run = uuid4().hex[:8]
        """By which an engine's weights are known to be from here."""
        self.client: EngineClient | None = None
        self.restarts = self.sent_bytes = 0
        """Since they were last reported."""
        self.losses = 0
        """Since it last drew a sample."""

    def holds(self, version: int) -> bool:
        """Whether the engine is ready to sample with these weights."""
        health = self.ready()
        return health is not None and health.weight_version == self.label(version)

    def ready_for_weights(self) -> tuple[bool, bool]:
        """Whether it can take weights, and whether it has those that adapters are sent to."""
        health = self.ready()
        return health is not None, health is not None and health.model_version == self.label(BASE)

    def label(self, version: int | str) -> str:
        """What the engine is to call the weights."""
        return f"{version} of {self.run}"

    def ready(self) -> Health | None:
        """Start the engine if it is lost, and wake it; none if it is lost in doing so."""
        try:
            if self.client is None:
                self.client = self.host.open()
            health = self.client.health()
            if health.asleep:
                self.client.wake()
            return health
        except EngineLostError as error:
            self.lost(error)
            return None

    def send(
        self, tensors: Iterator[tuple[str, Tensor]], version: int | str, dtype: torch.dtype, adapter: bool
    ) -> bool:
        """To an engine that is ready; false if it is lost in doing so.

        Raises `UserError` if these weights do not fit it.
        """
        settings = None
        if adapter:
            settings = {"rank": self.config.lora.lora_rank, "alpha": self.config.lora.lora_alpha}
        label, client = self.label(version), self.client.within(self.patience)
        with self._open_sender() as sender:
            try:
                client.begin_weights(label, sender.description, settings)
                sent = push(tensors, sender, client.load_bucket, dtype)
                check_held(client.end_weights(sent.names), sent, label)
            except (EngineLostError, TransportError) as error:
                self.lost(error)  # before the memory that it may still read is freed
                return False
        self.sent_bytes += sent.nbytes
        return True

    def draw(self, request: SampleRequest, version: int) -> Sample:
        """Raises `EngineLostError` if the engine is lost or holds other weights than these."""
        client = self.client
        if client is None:
            raise EngineLostError("another call has found the engine lost")
        drawn_by, sample = client.generate(request)
        if drawn_by != self.label(version):
            raise EngineLostError(f"the engine sampled with weights {drawn_by}, not {self.label(version)}")
        self.losses = 0
        return sample

    def rest(self) -> None:
        """Leave the device to the trainer, if both use it."""
        if self.client is None or not self.host.beside_trainer:
            return
        try:
            self.client.sleep()
        except EngineLostError as error:
            self.lost(error)

    def lost(self, error: Exception) -> None:
        """Give the engine up, so that it is opened anew. Raises `UserError` after too many times."""
        words = self.host.last_words()
        logger.warning("a rollout engine was lost: %s%s", error, words and f"\nIt said:\n{words}")
        self.client = None
        self.host.kill()
        self.losses += 1
        self.restarts += 1
        if self.losses > self.settings.rollout_restarts:
            raise UserError(
                f"a rollout engine was lost {self.losses} times in a row, without a sample in between; the "
                f"last time: {error}"
            ) from error

    def close(self) -> None:
        self.client = None
        self.host.close()

    def _open_sender(self) -> Sender:
        """For one update: no memory is held while training."""
        folder = self.settings.weight_transfer_folder
        return open_sender(
            self.settings.weight_transfer,
            self.settings.weight_transfer_bucket_mib * 2**20,
            self.settings.rollout_tensor_parallel_size,
            self.device,
            Path(folder) if folder else None,
            min(self.settings.rollout_timeout, self.patience),
            self.client.host,
        )


class Drawing:
    """The samples of one call, drawn by all engines of a replica at a time."""

    def __init__(self, links: list[Link], requests: list[SampleRequest], version: int):
        self.links, self.requests, self.version = links, requests, version
        self.threads = [
            ThreadPoolExecutor(2 * link.settings.rollout_max_num_seqs, "rollout") for link in links
        ]
        self.samples: list[Future[Sample]] = []
        if links:
            self.samples = [self._submit(index) for index in range(len(requests))]

    def wait(self, batch: range) -> list[int]:
        """Until these samples are there, or engines have been lost meanwhile: their numbers."""
        lost = set()
        for index in batch:
            try:
                self.samples[index].result()
            except CancelledError:  # with others of an engine that is in `lost`
                continue
            except EngineLostError as error:
                if index % len(self.links) not in lost:
                    self._abandon(index % len(self.links), error)
                lost.add(index % len(self.links))
        return sorted(lost)

    def resume(self) -> None:
        """Ask again for what lost engines have not answered."""
        for index, sample in enumerate(self.samples):
            if sample.cancelled() or (sample.done() and isinstance(sample.exception(), EngineLostError)):
                self.samples[index] = self._submit(index)

    def _abandon(self, number: int, error: EngineLostError) -> None:
        """Give up an engine and all that it has not answered, so that none of it reaches the next one."""
        own = self.samples[number :: len(self.links)]
        for sample in own:
            sample.cancel()
        self.links[number].lost(error)
        wait(sample for sample in own if not sample.cancelled())

    def close(self) -> None:
        for threads in self.threads:
            threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, index: int) -> Future[Sample]:
        number = index % len(self.links)
        return self.threads[number].submit(self.links[number].draw, self.requests[index], self.version)


def running_engines(config: Config, layout: Layout) -> list[str]:
    """Addresses of this replica's share of `rollout_urls`."""
    urls = config.vllm_omni.rollout_urls
    if len(urls) % layout.data_size:
        raise UserError(
            f"rollout_urls names {len(urls)} engines for {layout.data_size} data-parallel replicas: give a "
            "multiple."
        )
    return list(urls[layout.data_rank :: layout.data_size])


def own_devices(config: Config, layout: Layout) -> list[list[int]]:
    """Devices of each engine that this replica starts: as many engines as its devices have room for."""
    devices, size = layout.replica_devices(), config.vllm_omni.rollout_tensor_parallel_size
    if size > len(devices):
        raise UserError(
            f"rollout_tensor_parallel_size {size} is more than the {len(devices)} devices that a "
            "data-parallel replica has on one host: lower it, or start engines elsewhere and name them in "
            "rollout_urls."
        )
    if config.vllm_omni.weight_transfer == "process_group" and layout.device.type != "cpu":
        raise UserError(
            "weight_transfer process_group is for engines on other devices than the trainer's, which "
            "rollout_urls names: use shared_memory with engines that the run starts."
        )
    return [devices[start : start + size] for start in range(0, len(devices) - size + 1, size)]


def open_host(place: str | list[int], config: Config) -> Host:
    """Of an engine at an address, or of one that is started on these devices."""
    settings = config.vllm_omni
    if isinstance(place, str):
        return RunningEngine(place, settings.rollout_timeout)
    devices = current_platform().visible_devices(place)
    return EngineProcess(settings, config.model.model_path, config.model.bf16, devices)


def check_held(held: HeldWeights, sent: PushResult, version: str) -> None:
    for names, fault in ((held.missing, "did not come"), (held.unknown, "are not in the engine's model")):
        if names:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            raise UserError(
                "the trainer's weights do not fit the rollout engine: "
                f"{', '.join(names[:SHOWN_NAMES])}{more} {fault}."
            )
    if held.version != version or held.checksum != sent.checksum:
        raise EngineLostError(
            f"the engine holds weights {held.version} with checksum {held.checksum:x}; sent were {version} "
            f"with {sent.checksum:x}"
        )


def completed(function: Callable[..., Any], *args: Any) -> Future:
    """A future that holds what the function returned or raised."""
    future = Future()
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
    return future
