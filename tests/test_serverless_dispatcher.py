"""What is invoked when, again, or done on the server's cores; in virtual time."""

import random

import pytest

from dorylus_hpc.serverless.dispatcher import Dispatcher, FallBack, Invoke, Result, Rules

RULES = Rules(floor=1.0, ratio=4.0, first=15.0, attempts=4, pause=0.1, longest_pause=1.0, patience=30.0,
              breaker=8, probe=10.0)  # fmt: skip


def submitted(limit=10, count=1, rules=RULES, kind="AV"):
    dispatcher = Dispatcher(limit, rules)
    actions = [one for task in range(count) for one in dispatcher.submit(0.0, task, kind, (task,))]
    return dispatcher, actions


def invoked(actions):
    return [action.task for action in actions if isinstance(action, Invoke)]


def fell_back(actions):
    return [action.task for action in actions if isinstance(action, FallBack)]


def finish(dispatcher, action, now):
    """The worker's result is accepted, and then its call returns."""
    actions = dispatcher.accepted(now, action.task)
    return actions + dispatcher.returned(now, action.attempt, Result.DONE)


def until(dispatcher, end):
    """Let time pass; return what happens, with its time."""
    happened = []
    while (when := dispatcher.next_time) is not None and when <= end:
        happened += [(when, action) for action in dispatcher.tick(when)]
    return happened


def test_no_more_than_the_limit_fly_and_the_oldest_goes_first():
    dispatcher = Dispatcher(2, RULES)
    assert invoked(dispatcher.submit(0, "a", "AV", (3,))) == ["a"]
    assert invoked(first := dispatcher.submit(0, "b", "AV", (4,))) == ["b"]
    assert dispatcher.submit(0, "c", "AV", (9,)) == []
    assert dispatcher.submit(0, "d", "AV", (1,)) == []
    assert invoked(finish(dispatcher, first[0], 0.1)) == ["d"]
    assert dispatcher.counters.most == 2


def test_a_higher_limit_starts_what_waits():
    dispatcher, actions = submitted(limit=1, count=4)
    assert invoked(actions) == [0]
    assert invoked(dispatcher.limit(0.0, 3)) == [1, 2]
    assert dispatcher.limit(0.0, 1) == []
    assert invoked(finish(dispatcher, actions[0], 0.1)) == []


def test_in_the_first_wave_an_attempt_is_late_when_others_show_how_long_it_takes():
    dispatcher, actions = submitted(count=2)
    finish(dispatcher, actions[0], 0.5)  # 4 x 0.5 s
    happened = until(dispatcher, 14.9)
    assert [when for when, _ in happened] == [2.0, 4.0, 6.0, 8.0]
    assert invoked(action for _, action in happened) == [1, 1, 1]
    assert fell_back(action for _, action in happened) == [1]
    assert (dispatcher.counters.timeouts, dispatcher.counters.retries) == (4, 3)


def test_without_any_result_the_first_deadline_counts():
    dispatcher, _ = submitted()
    assert until(dispatcher, 14.99) == []
    assert [when for when, _ in until(dispatcher, 15.0)] == [15.0]


def test_kinds_have_deadlines_of_their_own():
    dispatcher, actions = submitted(kind="slow")
    finish(dispatcher, actions[0], 10.0)
    assert dispatcher.deadline("slow") == 40.0 and dispatcher.deadline("quick") == 15.0


def test_the_average_follows_but_one_that_was_held_up_counts_as_just_late():
    dispatcher, actions = submitted(count=2)
    finish(dispatcher, actions[0], 0.5)
    until(dispatcher, 5.0)
    dispatcher.accepted(1000.0, 1)
    dispatcher.returned(1000.0, actions[1].attempt, Result.DONE)
    assert dispatcher.deadline("AV") == pytest.approx(4 * (0.5 + 0.1 * (2.0 - 0.5)))


def test_a_late_attempt_may_still_win_and_the_other_is_not_repeated():
    dispatcher, actions = submitted()
    again = [action for _, action in until(dispatcher, 15.0)]
    assert invoked(again) == [0]
    assert finish(dispatcher, actions[0], 15.5) == []
    assert dispatcher.idle
    assert dispatcher.returned(16.0, again[0].attempt, Result.FAILED, "lost") == []
    assert until(dispatcher, 1e6) == []


def test_a_failed_attempt_is_repeated_after_growing_pauses_and_then_done_here():
    dispatcher, actions = submitted()
    now, pauses = 0.0, []
    for _ in range(3):
        assert dispatcher.returned(now, actions[0].attempt, Result.FAILED, "crash") == []
        [(when, action)] = until(dispatcher, now + 5)
        pauses.append(when - now)
        now, actions = when, [action]
    for pause, longest in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert longest / 2 <= pause <= longest
    assert fell_back(dispatcher.returned(now, actions[0].attempt, Result.FAILED, "crash")) == [0]
    counters = dispatcher.counters
    assert (counters.invocations, counters.retries, counters.failures, counters.fallbacks) == (4, 3, 4, 1)


def test_a_result_that_nobody_has_is_a_failure():
    dispatcher, actions = submitted()
    dispatcher.returned(0.1, actions[0].attempt, Result.DONE, "refused")
    assert dispatcher.counters.failures == 1
    assert [action.task for _, action in until(dispatcher, 1.0)] == [0]


def test_why_a_service_broke_that_answers_without_results():
    dispatcher, actions = submitted(limit=8, count=8)
    for action in actions:
        dispatcher.returned(0.1, action.attempt, Result.DONE)
    assert dispatcher.broken == "the function answers, but its results do not come"


def test_throttling_halves_what_flies_and_does_not_count_as_an_attempt():
    dispatcher, actions = submitted(limit=8, count=16)
    assert len(actions) == 8
    assert dispatcher.returned(0.01, actions[0].attempt, Result.THROTTLED) == []
    assert dispatcher.window == 4
    for action in actions[1:4]:  # of the same wave: only the first halves it
        dispatcher.returned(0.011, action.attempt, Result.THROTTLED)
    assert dispatcher.window == 4
    assert dispatcher.counters.throttles == 4 and dispatcher.counters.retries == 0
    for action in actions[4:]:
        finish(dispatcher, action, 0.02)
    assert dispatcher.window == 4  # four successes are one wave of four: 4 + 4 x 1/4 at most
    flying = invoked([action for _, action in until(dispatcher, 1.0)])
    assert len(flying) <= 5


def test_the_window_recovers_with_successes_up_to_the_limit():
    dispatcher, actions = submitted(limit=8, count=400)
    dispatcher.returned(0.01, actions[0].attempt, Result.THROTTLED)
    flying, now = actions[1:], 0.01
    while flying:
        now += 0.01
        more = finish(dispatcher, flying.pop(0), now)
        flying += [one for one in more if isinstance(one, Invoke)]
        flying += [one for _, one in until(dispatcher, now)]
        assert len(flying) <= 8
    assert dispatcher.window == 8


@pytest.mark.parametrize("answer", [0.01, 0.3])
def test_what_is_only_ever_throttled_is_done_here_in_the_end(answer):
    dispatcher, actions = submitted()
    now = 0.0
    while not fell_back(actions):
        assert now < 40
        now += answer
        actions = dispatcher.returned(now, actions[0].attempt, Result.THROTTLED)
        while not actions:
            now = max(now, dispatcher.next_time)
            actions = dispatcher.tick(now)
    assert 15.0 < now < 31.5 and dispatcher.counters.throttles > 20


def test_a_row_of_failures_breaks_and_a_probe_mends():
    dispatcher, actions = submitted(limit=10, count=10)
    for action in actions[:7]:
        assert fell_back(dispatcher.returned(0.1, action.attempt, Result.FAILED, "refused")) == []
    broke = dispatcher.returned(0.1, actions[7].attempt, Result.FAILED, "connection refused")
    assert sorted(fell_back(broke)) == list(range(8)) and dispatcher.broken == "connection refused"
    assert fell_back(dispatcher.submit(1.0, 50, "AV", (50,))) == [50]
    for action in actions[8:]:
        dispatcher.returned(1.0, action.attempt, Result.FAILED, "refused")
    probe = dispatcher.submit(11.1, 51, "AV", (51,))
    assert invoked(probe) == [51] and fell_back(dispatcher.submit(11.1, 52, "AV", (52,))) == [52]
    finish(dispatcher, probe[0], 11.2)
    assert dispatcher.broken == ""
    assert invoked(dispatcher.submit(11.3, 53, "AV", (53,))) == [53]


def test_successes_in_between_do_not_break():
    dispatcher, actions = submitted(limit=100, count=100)
    for number, action in enumerate(actions):
        if number % 5:
            dispatcher.returned(0.1, action.attempt, Result.FAILED, "crash")
        else:
            finish(dispatcher, action, 0.1)
    assert dispatcher.broken == ""


@pytest.mark.parametrize("how", ["fatal", "stop"])
def test_what_cannot_get_better_ends_invocations_for_good(how):
    dispatcher, actions = submitted(limit=2, count=4)
    if how == "fatal":
        done = dispatcher.returned(0.1, actions[0].attempt, Result.FATAL, "no such function")
        assert sorted(fell_back(done)) == [0, 2, 3]
    else:
        assert sorted(fell_back(dispatcher.stop(0.1, "the budget is spent"))) == [2, 3]
    finish(dispatcher, actions[1], 0.2)
    assert dispatcher.broken and fell_back(dispatcher.submit(1e6, 9, "AV", (9,))) == [9]
    assert dispatcher.counters.invocations == 2


def test_tasks_of_attempts_that_hang_in_a_broken_service_are_done_here_when_late():
    dispatcher, _ = submitted(limit=2, count=1)
    assert dispatcher.stop(0.1, "over") == []
    assert fell_back([action for _, action in until(dispatcher, 15.0)]) == [0]


def test_a_skipped_attempt_counts_for_nothing():
    dispatcher, actions = submitted()
    again = [action for _, action in until(dispatcher, 15.0)]
    dispatcher.accepted(15.1, 0)
    dispatcher.returned(15.1, again[0].attempt, Result.SKIPPED)
    assert dispatcher.counters.invocations == 1 and dispatcher.counters.failures == 0


@pytest.mark.parametrize("seed", range(60))
def test_every_task_ends_once_whatever_happens(seed):
    """Random outcomes, delays, throttles and lost calls, and a limit that changes."""
    rng = random.Random(seed)
    rates = rng.choice([(0.2, 0.2, 0.1, 0.2), (0, 0, 0, 0), (0.9, 0, 0, 0), (0, 0.9, 0, 0), (0, 0, 0.9, 0)])
    dispatcher = Dispatcher(rng.randint(1, 20), RULES, seed=seed)
    events, serial = [], 0  # (time, number, what, data)

    def later(now, what, data):
        nonlocal serial
        serial += 1
        events.append((now, serial, what, data))

    for task in range(100):
        later(rng.random() * 20, "submit", task)
    for _ in range(5):
        later(rng.random() * 20, "limit", rng.randint(1, 20))
    ended, flying = [], {}

    def do(now, actions):
        for action in actions:
            if isinstance(action, FallBack):
                later(now + rng.random(), "here", action.task)
                continue
            flying[action.attempt] = action.task
            draw, failed, lost = rng.random(), rates[0], rates[1]
            if draw < failed:
                later(now + rng.random(), "return", (action, rng.choice([Result.FAILED, Result.DONE]), None))
            elif draw < failed + lost:
                later(now + 40, "return", (action, Result.FAILED, None))
            elif draw < failed + lost + rates[2]:
                later(now + 0.01, "return", (action, Result.THROTTLED, None))
            else:
                slow = 10 if rng.random() < rates[3] else 0.2
                took = slow * rng.random()
                crashed = Result.FAILED if rng.random() < rates[0] else Result.DONE
                later(now + took, "accept", action.task)
                later(now + took, "return", (action, crashed, None))

    def accept(now, task):
        if task not in ended:
            ended.append(task)
            do(now, dispatcher.accepted(now, task))

    limits = 20
    while events or not dispatcher.idle:
        when = dispatcher.next_time
        first = min(events, default=None)
        if first is None or (when is not None and when <= first[0]):
            assert when is not None, "tasks are left and nothing will happen"
            do(when, dispatcher.tick(when))
            continue
        events.remove(first)
        now, _, what, data = first
        if what == "submit":
            do(now, dispatcher.submit(now, data, "AV", (data,)))
        elif what == "limit":
            do(now, dispatcher.limit(now, data))
        elif what in ("accept", "here"):
            accept(now, data)
        else:
            action, result, _ = data
            del flying[action.attempt]
            do(now, dispatcher.returned(now, action.attempt, result, "why"))
        assert dispatcher.window <= limits
    assert sorted(ended) == list(range(100)) and not flying
    counters = dispatcher.counters
    assert counters.tasks == 100
    assert counters.invocations == counters.invoked + counters.retries + counters.throttles
    assert 100 - counters.fallbacks <= counters.invoked <= 100


def test_a_service_that_hangs_breaks_too():
    """It answers nothing, neither results nor errors."""
    dispatcher, actions = submitted(limit=4, count=4)
    assert invoked(actions) == [0, 1, 2, 3]
    for end in (29.9, 44.9):
        happened = until(dispatcher, end)
        assert invoked(action for _, action in happened) == [0, 1, 2, 3] and not dispatcher.broken
    happened = until(dispatcher, 45.0)
    assert sorted(fell_back(action for _, action in happened)) == [0, 1, 2, 3]
    assert dispatcher.broken == "no answer in time"
    assert fell_back(dispatcher.submit(46.0, 4, "AV", (4,))) == [4]


def test_what_is_slow_while_results_come_does_not_break():
    dispatcher, actions = submitted(limit=20, count=20)
    finish(dispatcher, actions[0], 0.1)
    until(dispatcher, 1.0)  # all are late, and have a second attempt
    finish(dispatcher, actions[1], 1.1)
    until(dispatcher, 2.0)
    assert not dispatcher.broken and dispatcher.counters.timeouts > 20


def test_a_function_that_is_only_ever_throttled_breaks():
    """Its concurrency may have been set to 0: the next tasks do not wait."""
    dispatcher, actions = submitted(count=2)
    now = 0.0
    while actions or not dispatcher.broken:
        assert now < 32
        for action in actions:
            if isinstance(action, Invoke):
                now += 0.01
                dispatcher.returned(now, action.attempt, Result.THROTTLED, "Rate Exceeded.")
        now = max(now, dispatcher.next_time)
        actions = dispatcher.tick(now)
    assert dispatcher.broken == "Rate Exceeded." and dispatcher.counters.fallbacks == 2
    assert fell_back(dispatcher.submit(now, 2, "AV", (2,))) == [2]
    (probe,) = dispatcher.submit(now + 10, 3, "AV", (3,))
    assert fell_back(dispatcher.returned(now + 10, probe.attempt, Result.THROTTLED)) == [3]
    (probe,) = dispatcher.submit(now + 20, 4, "AV", (4,))
    finish(dispatcher, probe, now + 20.1)
    assert not dispatcher.broken


def test_throttling_while_results_come_does_not_break():
    dispatcher, actions = submitted(count=2)
    finish(dispatcher, actions[0], 1.0)
    dispatcher.returned(1.0, actions[1].attempt, Result.THROTTLED)
    actions = [action for _, action in until(dispatcher, 2.0)]
    assert fell_back(dispatcher.returned(31.0, actions[0].attempt, Result.THROTTLED)) == [1]
    assert not dispatcher.broken


def test_the_reason_of_an_end_for_good_stays():
    dispatcher, actions = submitted(count=9)
    dispatcher.stop(1.0, "the budget is spent")
    until(dispatcher, 100.0)
    assert dispatcher.broken == "the budget is spent" and dispatcher.counters.timeouts == len(actions)


def test_a_probe_that_hangs_holds_its_task_for_a_moment_only():
    dispatcher, actions = submitted(limit=8, count=8)
    for action in actions:
        dispatcher.returned(0.1, action.attempt, Result.FAILED, "connection refused")
    (probe,) = dispatcher.submit(11.0, 50, "new", (50,))  # of a kind that nothing is known of
    assert invoked([probe]) == [50] and until(dispatcher, 11.99) == []
    assert [(when, fell_back([one])) for when, one in until(dispatcher, 12.0)] == [(12.0, [50])]
    dispatcher.accepted(12.1, 50)
    assert fell_back(dispatcher.submit(20.0, 51, "new", (51,))) == [51]  # the next probe is not due
    dispatcher.accepted(20.1, 51)
    assert dispatcher.broken
    dispatcher.returned(20.5, probe.attempt, Result.DONE)  # slow, but it answers
    assert dispatcher.broken == "" and invoked(dispatcher.submit(21.0, 52, "new", (52,))) == [52]


def test_a_task_pauses_for_429_no_longer_than_an_attempt_may_take():
    """Where most calls are throttled, each stage of each epoch would wait for all of the patience."""
    dispatcher, actions = submitted(limit=1, count=1)
    finish(dispatcher, actions[0], 0.01)
    (one,) = dispatcher.submit(1.0, 1, "AV", (1,))
    now, calls = 1.0, 0
    while isinstance(one, Invoke):
        calls += 1
        actions = dispatcher.returned(now, one.attempt, Result.THROTTLED, "Rate Exceeded.")
        while not actions:
            now = dispatcher.next_time
            actions = dispatcher.tick(now)
        (one,) = actions
    assert fell_back([one]) == [1] and calls > 3
    assert 2.0 <= now < 3.0  # 1 s of pauses, of which the last is no longer than 1 s here


def test_waiting_for_a_place_is_no_pause_for_429():
    dispatcher, actions = submitted(limit=2, count=30)
    now, done = 0.0, 0
    while done < 30:
        flying = [action for action in actions if isinstance(action, Invoke)]
        actions = []
        for place, action in enumerate(flying):  # one place is all there is
            now += 0.5
            if place == 0:
                actions += finish(dispatcher, action, now)
                done += 1
            else:
                actions += dispatcher.returned(now, action.attempt, Result.THROTTLED, "Rate Exceeded.")
        if not actions and dispatcher.next_time is not None:
            now = max(now, dispatcher.next_time)
            actions = dispatcher.tick(now)
    assert dispatcher.counters.fallbacks == 0 and dispatcher.counters.throttles > 3
