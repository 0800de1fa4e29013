# /// cell
# causes = ["cpu_preprocessing"]
# because = "a booking is taken from a data frame row by row, and its dates are parsed and compared, on each access"
# batch = 32
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#         self.df = df.reset_index(drop=True)
# '''
# new = '''
#         self.df = df.reset_index(drop=True)
#         self.ready = [self.get_features(i) for i in range(len(df))]
# '''
#
# [[cure]]
# old = "features, label = self.get_features(idx)"
# new = "features, label = self.ready[idx]"
# ///
# Data Mining course, final project
# Topic: predict if a hotel booking gets cancelled
# Group 7

# import the libraries
from datetime import date, datetime, timedelta

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

np.random.seed(7)
torch.manual_seed(7)

# the public holidays of our country (day, month)
holidays = [(1, 1), (6, 1), (1, 5), (15, 8), (3, 10), (1, 11), (8, 12), (25, 12), (26, 12)]

# the original csv is too big for the submission so we generate similar data
n = 3000
first_day = date(2015, 7, 1)
booked = [first_day + timedelta(days=int(d)) for d in np.random.randint(0, 700, n)]
arrival = [b + timedelta(days=int(d)) for b, d in zip(booked, np.random.gamma(2, 40, n), strict=True)]
leave = [a + timedelta(days=int(d)) for a, d in zip(arrival, np.random.randint(1, 12, n), strict=True)]
bookings = pd.DataFrame(
    {
        "booked_on": [b.strftime("%d.%m.%Y") for b in booked],
        "arrival_date": [a.strftime("%d.%m.%Y") for a in arrival],
        "leave_date": [d.strftime("%d.%m.%Y") for d in leave],
        "adults": np.random.randint(1, 4, n),
        "children": np.random.randint(0, 3, n),
        "adr": np.random.gamma(4, 25, n).round(2),
        "deposit": np.random.choice(["No Deposit", "Refundable", "Non Refund"], n),
    }
)
bookings["cancelled"] = ((bookings["adr"] > 110) ^ (bookings["deposit"] == "Refundable")).astype(int)


def string_to_date(s):
    return datetime.strptime(s, "%d.%m.%Y")


# custom dataset like we learned in the lab
class BookingDataset(Dataset):
    def __init__(self, df):
        self.df = df.reset_index(drop=True)

    def __len__(self):
        return len(self.df)

    def get_features(self, idx):
        row = self.df.iloc[idx]
        d1 = string_to_date(row["booked_on"])
        d2 = string_to_date(row["arrival_date"])
        d3 = string_to_date(row["leave_date"])
        lead_time = (d2 - d1).days
        nights = (d3 - d2).days
        # count weekend nights and holidays during the stay
        weekend = 0
        holiday = 0
        for k in range(nights):
            day = d2 + timedelta(days=k)
            if day.weekday() >= 5:
                weekend += 1
            if (day.day, day.month) in holidays:
                holiday += 1
        features = [
            lead_time / 100,
            nights / 10,
            weekend / 4,
            holiday,
            row["adults"],
            row["children"],
            row["adr"] / 100,
        ]
        features += [1.0 if d2.month == m else 0.0 for m in range(1, 13)]
        features += [1.0 if row["deposit"] == d else 0.0 for d in ["No Deposit", "Refundable", "Non Refund"]]
        return torch.tensor(features, dtype=torch.float32), torch.tensor(row["cancelled"])

    def __getitem__(self, idx):
        features, label = self.get_features(idx)
        return features, label


train_dataset = BookingDataset(bookings)

# %% the training cell
train_loader = DataLoader(train_dataset, batch_size=32, shuffle=True)

# define the network
model = nn.Sequential(
    nn.Linear(22, 512),
    nn.ReLU(),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 2),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

# train the model
for epoch in range(3):
    correct = 0
    for features, labels in train_loader:
        optimizer.zero_grad()
        outputs = model(features)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        correct += (outputs.argmax(1) == labels).sum().item()
    print("Epoch", epoch + 1, "accuracy:", correct / len(train_dataset))
