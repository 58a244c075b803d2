"""When to put the next step together while one runs: as late as the device lets us.

A step decided early keeps the device busy, but who arrives after the decision waits for a whole
step more. So the host waits until the running step is nearly over. Whoever comes until then joins
the very next step, and so does whoever takes the place of one that has just ended.

How late is late enough is found by trial, with the Robbins-Monro rule for a quantile: every launch
in time moves the moment a little later, every one that found the device idle moves it much earlier,
so that one launch in twenty is late in the long run, whatever the errors of predictions and the
time that the host needs look like.
"""

__all__ = ["LaunchTimer"]

# Launches that may find the device idle; it then waits for a few milliseconds at most.
LATE_SHARE = 0.05

# How fast the moment moves, in shares of a step: it crosses one in a thousand steps, back in fifty.
RATE = 0.02

# Where it starts.
FIRST_MOMENT = 0.5


class LaunchTimer:
    """Knows how long the host may wait before it puts the next step together.

    Attributes:
        moment: what share of the running step's predicted time passes before.
    """

    def __init__(self) -> None:
        self.moment = FIRST_MOMENT

    def begins_at_s(self, start_s: float, predicted_s: float) -> float:
        """Return when the host should begin.

        Args:
            start_s: when the device began the step that runs now.
            predicted_s: how long that step should take.
        """
        return start_s + self.moment * predicted_s

    def note(self, *, was_late: bool) -> None:
        """Learn whether the device was idle already when it got its next step."""
        change = RATE * (LATE_SHARE - was_late)
        self.moment = min(max(0.0, self.moment + change), 1.0)
