"""Pure decisions: no tasks, clients, clocks or randomness. `now` is an argument; the next wake-up is a return value."""
