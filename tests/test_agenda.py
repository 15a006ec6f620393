"""The agenda and SimPy's own events share one queue."""

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from simpy.core import EmptySchedule

from twin.agenda import Agenda, Entry
from twin.clock import NEVER_PS

things = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=12
)


@given(things, st.booleans())
def test_entries_and_events_happen_in_one_order(things, steps_by_simpy):
    env = simpy.Environment()
    agenda = Agenda(env)
    happened = []
    for number, (is_entry, delay_ps, priority) in enumerate(things):

        def note(_, number=number):
            happened.append((agenda.now_ps, number))

        if is_entry:
            agenda.put(Entry(note), priority, delay_ps)
        else:
            event = simpy.Event(env)
            event._ok, event._value, event.callbacks = True, None, [note]
            env.schedule(event, priority, delay_ps)
    expected = sorted((delay, priority, i) for i, (_, delay, priority) in enumerate(things))
    for delay_ps, _, _ in expected:
        assert agenda.next_ps() == delay_ps
        env.step() if steps_by_simpy else agenda.step()
    assert happened == [(delay_ps, number) for delay_ps, _, number in expected]
    assert agenda.next_ps() == NEVER_PS
    with pytest.raises(EmptySchedule):
        agenda.step()


def test_a_process_may_wait_for_an_entry():
    env = simpy.Environment()
    agenda = Agenda(env)
    seen = []

    def waits():
        entry = Entry()
        agenda.put(entry, 1, 7)
        yield entry
        seen.append(env.now)

    env.process(waits())
    while agenda.next_ps() < NEVER_PS:
        agenda.step()
    assert seen == [7]


def test_an_entry_that_was_emptied_does_nothing():
    agenda = Agenda(simpy.Environment())
    seen = []
    entry = Entry(seen.append)
    agenda.put(entry, 1, 3)
    entry.callbacks = []
    agenda.step()
    assert not seen
    assert agenda.now_ps == 3
