"""Identifiers: distinct static types over plain values, so that nothing passes a group where a trajectory is meant."""

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
"""One incarnation of a worker, such as `engine/H20/0.1`; a restarted one has a new id: events of the old are void."""

PromptId = NewType("PromptId", str)
"""What a prompt source calls an item; unique within its task."""
