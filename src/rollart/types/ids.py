"""Identifiers: distinct static types over plain values, so that a group cannot be passed for a trajectory."""

from typing import NewType

TrajectoryId = NewType("TrajectoryId", int)
"""One attempt at one member of a group; never reused in a run, so a late reply only matches the attempt it is for."""

GroupId = NewType("GroupId", int)
"""The trajectories that share one prompt and one baseline."""

ClaimId = NewType("ClaimId", int)
"""One batch handed to the trainer. A claim ends in a trained step or is returned."""

RequestId = NewType("RequestId", int)
"""One generation request at one engine: a turn that moves to another engine gets a new one."""

WorkerId = NewType("WorkerId", str)
"""One incarnation of a worker, such as `engine/H20/0.1`. A restart gets a new id; events of the old id are ignored."""

PromptId = NewType("PromptId", str)
"""Identifier that a prompt source gives to an item; unique within its task."""
