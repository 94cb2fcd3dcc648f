# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

from torch.utils.data import Dataset


class Items(Dataset):
    """A map-style ``Dataset`` of whatever is in a list."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]
