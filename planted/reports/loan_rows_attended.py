# /// cell
# cohort = "third"
# because = "healthy"
# ///
import torch
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.preprocessing import StandardScaler

torch.manual_seed(0)
X, y = make_classification(12_000, 20, n_informative=12, n_classes=3, random_state=0)
X = torch.from_numpy(StandardScaler().fit_transform(X)).float()
y = torch.from_numpy(y).long()
X_train, y_train, X_test, y_test = X[:11_000], y[:11_000], X[11_000:], y[11_000:]


class FeatureTransformer(nn.Module):
    def __init__(self, columns=20, width=64, classes=3):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(columns, width) * 0.1)
        self.shift = nn.Parameter(torch.randn(columns, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x):
        return self.head(self.body(x.unsqueeze(-1) * self.scale + self.shift).mean(1))


model = FeatureTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()

# %% the training cell
for epoch in range(2):
    model.train()
    for rows in torch.randperm(len(X_train)).split(256):
        loss = criterion(model(X_train[rows]), y_train[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(X_test).argmax(1) == y_test).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.3f}")
