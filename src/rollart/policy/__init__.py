"""Pure decisions: no task, no client, no clock, no randomness. `now` is passed in, the next wake-up is returned."""
