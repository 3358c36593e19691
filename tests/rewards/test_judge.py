"""Judges against a scripted server: strict answers, bounded retries, many requests in flight."""

import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.errors import UserError
from megatron_omni.rewards import endpoints
from megatron_omni.rewards.judges import OcrJudge, ScoreJudge
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rewards.worker import score as score_in_worker
from tests.rewards.judge_server import (
    JudgeServer,
    Reply,
    assert_judges_alike_twice,
    options,
    picture,
    question,
    score,
)

PICTURE = np.zeros((1, 8, 8, 3), np.uint8)
ROW = {"prompt": 'a sign that says "OPEN"'}


def by_pixel(request: dict) -> Reply:
    """The first pixel's red value as the score."""
    return score(int(picture(request)[0, 0, 0]))


def batch(count: int) -> tuple[torch.Tensor, list[dict]]:
    """Image i has the red value i % 11."""
    images = torch.zeros(count, 3, 6, 8, dtype=torch.uint8)
    images[:, 0] = (torch.arange(count) % 11)[:, None, None]
    return images, [{"prompt": f"prompt {i}"} for i in range(count)]


def expected(count: int) -> list[float]:
    return pytest.approx([i % 11 / 10 for i in range(count)])


def judged(server: JudgeServer, kind=ScoreJudge, row=ROW, **settings) -> tuple[float, str]:
    """One picture's value and error, as the scoring process makes them."""
    ((value,), error) = score_in_worker(kind.from_options(options(server.url, **settings)), PICTURE, [row])
    return value, error


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_PAUSE", 0.02)


def test_scores_are_mapped_to_one_and_come_in_the_order_of_the_images():
    with JudgeServer(by_pixel) as server, RewardPool("judge_score", 1, 5, options(server.url)) as pool:
        result = pool.submit(*batch(22)).result()
    assert result.valid.all() and result.error == ""
    assert result.values.tolist() == expected(22)


def test_the_request_is_greedy_seeded_structured_and_holds_the_picture_without_loss():
    noise = np.random.default_rng(0).integers(0, 256, (1, 33, 47, 3), dtype=np.uint8)
    with JudgeServer(lambda _: score(7)) as server:
        reward = ScoreJudge.from_options(options(server.url))
        assert reward.score(noise, [{"prompt": "two <b>cats</b>"}]) == [0.7]
    (request,) = server.requests
    assert (picture(request) == noise[0]).all()
    assert "two <b>cats</b>" in question(request) and "from 0 to 10" in question(request)
    assert (request["model"], request["temperature"], request["seed"]) == ("judge", 0, 0)
    schema = request["response_format"]["json_schema"]
    assert request["response_format"]["type"] == "json_schema" and schema["strict"]
    assert schema["schema"]["additionalProperties"] is False
    assert schema["schema"]["required"] == ["score"]
    assert schema["schema"]["properties"]["score"] | {"title": ""} == {
        "type": "integer", "minimum": 0, "maximum": 10, "title": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("read", "value"),
    [("OPEN", 1), ("open", 1), ("O P E N", 1), ("OPIN", 0.75), ("OPEN OPEN", 0), ("", 0), ("xyzw" * 9, 0)],
)
def test_the_ocr_judge_compares_what_was_read_with_the_target(read, value):
    with JudgeServer(lambda _: Reply(json.dumps({"text": read}))) as server:
        assert judged(server, OcrJudge) == (value, "")
    assert "OPEN" not in json.dumps(server.requests[0]["messages"])  # a judge that knows the text sees it


@given(st.text(max_size=20), st.text(max_size=20))
def test_words_around_the_target_never_give_the_full_score(before, after):
    answer = OcrJudge.Answer(text=before + "OPEN" + after)
    if (before + after).strip():
        assert 0 <= OcrJudge.value(None, answer, ROW) < 1


CHOICE = {"finish_reason": "stop", "message": {"content": '{"score": 1}'}}
UNUSABLE = {
    "no choices": Reply(body={"choices": []}),
    "null choices": Reply(body={"choices": None}),
    "two choices": Reply(body={"choices": [CHOICE] * 2}),
    "no message": Reply(body={"choices": [{"finish_reason": "stop"}]}),
    "no content": Reply(None),
    "empty content": Reply(""),
    "half JSON": Reply('{"score": '),
    "half JSON body": Reply(body='{"choices": [{"mess'),
    "cut short": score(7, finish_reason="length"),
    "filtered": score(7, finish_reason="content_filter"),
    "prose": Reply("I would give this picture a 7."),
    "prose around": Reply('The answer is {"score": 7}.'),
    "markdown": Reply('```json\n{"score": 7}\n```'),
    "two answers": Reply('{"score": 7}{"score": 9}'),
    "fraction": Reply("8/10"),
    "other key": Reply('{"rating": 7}'),
    "more keys": Reply('{"score": 7, "bonus": 3}'),
    "text": score("7"),
    "not whole": score(7.5),
    "truth": score(True),
    "null": score(None),
    "list": score([7]),
    "NaN": Reply('{"score": NaN}'),
    "too high": score(11),
    "too low": score(-1),
    "huge": Reply('{"score": 1e400}'),
    "a page": Reply(body="<html>proxy</html>", headers={"Content-Type": "text/html"}),
    "an error as success": Reply(body={"error": {"message": "no such model"}}),
    "bad request": Reply(body={"error": {"message": "no such picture"}}, status=400),
    "unknown model": Reply(body={"error": {"message": "no such model"}}, status=404),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNUSABLE)
def test_an_answer_that_is_not_the_schemas_masks_the_sample_and_is_not_asked_for_again(fault):
    with JudgeServer(lambda _: UNUSABLE[fault]) as server:
        value, error = judged(server)
    assert np.isnan(value)
    assert "judge" in error and ("cannot be used" in error or "HTTP 40" in error)
    assert len(server.requests) == 1


TRANSIENT = {
    "500": Reply(status=500, body="boom"),
    "503": Reply(status=503, body={"error": {"message": "loading"}}),
    "429": Reply(status=429, body={"error": {"message": "busy"}}, headers={"Retry-After": "0"}),
    "no answer": Reply(hang=True),
    "cut connection": score(7, cut=True),
}


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_request_that_failed_is_sent_again(fault, short_pauses):
    replies = iter([TRANSIENT[fault], score(7)])
    with JudgeServer(lambda _: next(replies)) as server:
        assert judged(server, timeout=1.0) == (0.7, "")
    assert len(server.requests) == 2
    assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_request_that_always_fails_is_given_up_and_masked(fault, short_pauses):
    start = time.monotonic()
    with JudgeServer(lambda _: TRANSIENT[fault]) as server:
        value, error = judged(server, timeout=0.5)
    assert np.isnan(value) and "tried 3 times" in error
    assert len(server.requests) == 3
    assert time.monotonic() - start < 15


def test_one_bad_answer_costs_only_its_own_sample():
    def script(request):
        red = int(picture(request)[0, 0, 0])
        return Reply("garbage") if red == 3 else score(red)

    with JudgeServer(script) as server, RewardPool("judge_score", 1, 5, options(server.url)) as pool:
        result = pool.submit(*batch(8)).result()
    assert result.valid.tolist() == [i != 3 for i in range(8)]
    assert result.values[3] == 0 and "garbage" in result.error
    assert len(server.requests) == 8


def test_many_batches_are_in_flight_at_once_up_to_the_limit():
    held = threading.Event()

    def script(request):
        held.wait(30)
        return by_pixel(request)

    with (
        JudgeServer(script) as server,
        RewardPool("judge_score", 1, 5, options(server.url, concurrency=6, timeout=30.0)) as pool,
    ):
        pending = [pool.submit(*batch(4)) for _ in range(9)]  # returns while nothing is answered
        server.wait_for(6)
        time.sleep(0.5)
        assert server.in_flight == 6
        held.set()
        assert all(each.result().values.tolist() == expected(4) for each in pending)
        assert server.most_in_flight == 6
        assert len(server.requests) == 36


def test_results_do_not_depend_on_the_order_of_the_answers():
    wait = random.Random(0)

    def script(request):
        return score(int(picture(request)[0, 0, 0]), delay=wait.uniform(0, 0.05))

    with JudgeServer(script) as server, RewardPool("judge_score", 2, 5, options(server.url)) as pool:
        for _ in range(3):
            pending = [pool.submit(*batch(count)) for count in (5, 16, 1, 30)]
            for count, each in zip((5, 16, 1, 30), pending, strict=True):
                assert each.result().values.tolist() == expected(count)


def test_samples_in_flight_when_the_scoring_process_is_killed_are_judged_again():
    held = threading.Event()

    def script(request):
        held.wait(5)
        return by_pixel(request)

    with JudgeServer(script) as server, RewardPool("judge_score", 1, 5, options(server.url)) as pool:
        pending = pool.submit(*batch(8))
        server.wait_for(8)
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        held.set()
        result = pending.result()
        assert pool.restarts == 1
    assert result.values.tolist() == expected(8) and result.valid.all()


def test_a_server_that_dies_and_comes_back_loses_no_sample():
    with (
        JudgeServer(by_pixel) as server,
        RewardPool("judge_score", 1, 5, options(server.url, retries=4)) as pool,
    ):
        assert pool.submit(*batch(4)).result().valid.all()
        server.stop()
        pending = pool.submit(*batch(8))
        time.sleep(1)
        server.start()
        assert pending.result().values.tolist() == expected(8)


def test_a_server_that_dies_and_stays_away_masks_all_within_a_bounded_time():
    with (
        JudgeServer(by_pixel) as server,
        RewardPool("judge_score", 1, 5, options(server.url, retries=2)) as pool,
    ):
        server.stop()
        start = time.monotonic()
        result = pool.submit(*batch(16)).result()
        server.start()
    assert time.monotonic() - start < 15
    assert not result.valid.any() and "tried 3 times" in result.error and server.url in result.error


def test_of_several_servers_the_dead_one_is_avoided_until_it_is_back():
    with (
        JudgeServer(by_pixel) as one,
        JudgeServer(by_pixel) as two,
        RewardPool("judge_score", 1, 5, options(one.url, two.url)) as pool,
    ):
        assert pool.submit(*batch(40)).result().valid.all()
        assert len(one.requests) > 5 and len(two.requests) > 5
        two.stop()
        assert pool.submit(*batch(40)).result().values.tolist() == expected(40)
        two.start()
        before = len(two.requests)
        for _ in range(60):
            assert pool.submit(*batch(40)).result().valid.all()
            if len(two.requests) > before + 5:
                break
            time.sleep(0.1)
        assert len(two.requests) > before + 5


def test_a_judge_answers_alike_twice():
    with JudgeServer(lambda request: score(int(picture(request)[0, 0, 0]) % 11)) as server:
        assert assert_judges_alike_twice(server.url, "judge").valid.all()


def test_it_is_checked_at_the_start_that_a_server_has_the_model():
    nobody = "http://127.0.0.1:9/v1"
    with JudgeServer(by_pixel) as server:
        ScoreJudge.from_options(options(server.url, nobody)).check_prompts([ROW])
        with pytest.raises(UserError, match="serves judge, not judge_model 'other'"):
            ScoreJudge.from_options(options(server.url, model="other")).check_prompts([ROW])
    with (
        RewardPool("judge_score", 1, 5, options(nobody)) as pool,
        pytest.raises(UserError, match=r"no judge answers.*127.0.0.1:9.*judge_urls"),
    ):
        pool.check_prompts([ROW])


def test_a_proxy_is_not_asked_for_a_judge_on_this_host(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with JudgeServer(by_pixel) as server:
        ScoreJudge.from_options(options(server.url)).check_prompts([ROW])
        assert judged(server)[1] == ""


def test_a_prompt_without_text_to_draw_is_an_error_of_the_ocr_judge():
    judge = OcrJudge.from_options(options("http://127.0.0.1:9/v1"))
    judge.check_prompt(ROW)
    with pytest.raises(UserError, match="'a sign' does not say which text"):
        judge.check_prompt({"prompt": "a sign"})


def test_your_own_template_takes_the_place_of_the_packaged_one(tmp_path):
    (tmp_path / "judge_score.jinja").write_text("Rate {{ prompt }} for {{ audience }}.")
    with JudgeServer(lambda _: score(5)) as server:
        row = ROW | {"audience": "children"}
        assert judged(server, row=row, templates=str(tmp_path)) == (0.5, "")
    assert question(server.requests[0]) == f"Rate {ROW['prompt']} for children."
    judge = ScoreJudge.from_options(options("http://127.0.0.1:9/v1", templates=str(tmp_path)))
    with pytest.raises(UserError, match=r"judge_score.jinja does not suit .*'audience' is undefined"):
        judge.check_prompt(ROW)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "has no judge_score.jinja; copy"), ("{{ x", "cannot be used")]
)
def test_a_template_that_cannot_be_used_is_an_error_at_the_start(tmp_path, text, message):
    if text:
        (tmp_path / "judge_score.jinja").write_text(text)
    with pytest.raises(UserError, match=message):
        RewardPool("judge_score", 1, 5, options("http://127.0.0.1:9/v1", templates=str(tmp_path)))


def test_a_judge_of_ones_own_needs_a_template_an_answer_and_a_value():
    rows = [{"prompt": "", "object": "car", "colour": colour} for colour in ("red", "blue")]
    with (
        JudgeServer(lambda _: Reply('{"colour": "blue"}')) as server,
        RewardPool("tests.rewards.example_judges:ColourJudge", 1, 5, options(server.url)) as pool,
    ):
        pool.check_prompts(rows)
        result = pool.submit(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), rows).result()
        with pytest.raises(UserError, match="'object' is undefined"):
            pool.check_prompts([{"prompt": ""}])
    assert result.values.tolist() == [0, 1] and result.valid.all()
    assert "the car in this picture" in question(server.requests[0])
