"""The copy that training waits for: into memory that is kept."""

from __future__ import annotations

import torch

from safetrain.staging import Staging


def state(value: float) -> dict[str, torch.Tensor]:
    image = torch.full((2, 3, 4, 5), value).to(memory_format=torch.channels_last)
    return {"image": image, "turned": torch.full((3, 2), value).t(), "count": torch.tensor(int(value))}


def test_the_copy_holds_when_the_state_changes() -> None:
    staging, given = Staging(), state(1)
    copies = staging.copy(given)
    for tensor in given.values():
        tensor.zero_()
    for name, tensor in state(1).items():
        assert torch.equal(copies[name], tensor)
        assert (copies[name].dtype, copies[name].stride()) == (tensor.dtype, tensor.stride())


def test_memory_is_used_again_where_it_fits() -> None:
    staging = Staging()
    places = {name: copy.data_ptr() for name, copy in staging.copy(state(1)).items()}
    again = staging.copy(state(2))
    assert {name: copy.data_ptr() for name, copy in again.items()} == places
    assert torch.equal(again["image"], state(2)["image"])


def test_a_tensor_may_take_another_shape_or_go() -> None:
    staging = Staging()
    staging.copy(state(1))
    for other in (torch.ones(7), torch.ones(7, dtype=torch.float64), torch.ones(2, 3, 4, 5)):
        copies = staging.copy({"image": other})
        assert list(copies) == ["image"]
        assert torch.equal(copies["image"], other)
        assert copies["image"].dtype == other.dtype
