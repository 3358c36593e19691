"""A reward that `python -m megatron_omni.rewards.server` scores, usually on another host."""

from typing import Any, Self

import numpy as np
import requests

from megatron_omni.config.schema import HttpRewardConfig
from megatron_omni.errors import UserError
from megatron_omni.rewards.base import Reward, Unscored
from megatron_omni.rewards.endpoints import Endpoints, TransientError, is_local, is_transient
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.wire import CONTENT_TYPE, pack, unpack


class HttpReward(Reward):
    """Sends batches to one of several reward servers. A batch that none of them scores is masked."""

    batch_size = 16

    def __init__(self, settings: HttpRewardConfig):
        self.urls = [url.rstrip("/") for url in settings.http_urls]
        self.timeout = settings.http_timeout
        self.endpoints = Endpoints(self.urls, settings.http_retries)
        self.concurrency = settings.http_concurrency
        self.time_limit = self.endpoints.time_limit(settings.http_timeout)

    @classmethod
    def from_options(cls, options: RewardOptions) -> Self:
        return cls(options.http)

    def check_prompts(self, metadata: list[dict[str, Any]]) -> None:
        """Lets a server check them. Also, all servers that answer must have the same reward."""
        self._check_servers()
        try:
            response = self.endpoints.call(
                lambda url: self._post(f"{url}/check", json={"metadata": metadata})
            )
            error = response.json()["error"]
        except (Unscored, ValueError, KeyError, TypeError) as failure:
            raise UserError(f"the reward server cannot check the prompts: {failure}") from failure
        if error:
            raise UserError(error)

    def score(self, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
        message = pack({"metadata": metadata}, {"images": images})
        headers = {"Content-Type": CONTENT_TYPE}
        response = self.endpoints.call(lambda url: self._post(f"{url}/score", data=message, headers=headers))
        try:
            answer, arrays = unpack(response.content)
            values, error = arrays["values"], answer["error"]
        except (ValueError, KeyError) as failure:
            raise Unscored(f"reward server {response.url}: its answer is damaged: {failure!r}") from failure
        if values.shape != (len(images),):
            raise Unscored(f"reward server {response.url} gave values of shape {values.shape}")
        if error:
            raise Unscored(f"reward server {response.url}: {error}", values.tolist())
        return values.tolist()

    def _post(self, url: str, **content: Any) -> requests.Response:
        try:
            response = self._request("POST", url, **content)
        except requests.RequestException as error:
            raise TransientError(f"reward server {url}: {error}") from error
        if response.status_code != requests.codes.ok:
            message = f"reward server {url}: HTTP {response.status_code}: {response.text[:500]}"
            raise (TransientError if is_transient(response.status_code) else Unscored)(message)
        return response

    def _request(self, method: str, url: str, **content: Any) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = not is_local(url)
            return session.request(method, url, timeout=self.timeout, **content)

    def _check_servers(self) -> None:
        served, errors = {}, []
        for url in self.urls:
            try:
                served[url] = self._request("GET", f"{url}/health").json()["reward"]
            except (requests.RequestException, ValueError, KeyError, TypeError) as error:
                errors.append(f"{url}: {error!r}")
        if not served:
            raise UserError(
                f"no reward server answers ({'; '.join(errors)}); start one "
                "(python -m megatron_omni.rewards.server), or set http_urls"
            )
        if len(set(served.values())) > 1:
            listed = ", ".join(f"{url}: {reward}" for url, reward in served.items())
            raise UserError(f"all servers in http_urls must have the same reward, not {listed}")
