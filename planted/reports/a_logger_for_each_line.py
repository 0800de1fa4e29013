# /// cell
# because = "get_logger() is called at every step and adds one more FileHandler each time, so that the n-th message is formatted and written n times."
# thread = "https://stackoverflow.com/questions/7173033/duplicate-log-output-when-using-python-logging-module"
# line = "logger.addHandler(handler)"
# callee = "logging.Logger.callHandlers"
# faster = 2.54
# ///
import logging, os, tempfile
import torch
import torch.nn as nn

torch.manual_seed(0)
log_path = os.path.join(tempfile.mkdtemp(), "train.log")


def get_logger(name="train"):
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.FileHandler(log_path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    return logger


signal = torch.sin(torch.arange(0, 4000, 0.1)).unfold(0, 65, 1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# %% the training cell
def train_step(step):
    window = signal[torch.randint(len(signal), (64,))]
    loss = nn.functional.mse_loss(model(window[:, :64]), window[:, 64:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log = get_logger()
    log.info("step %d loss %.5f", step, loss.item())
    return loss


for step in range(380):
    loss = train_step(step)
print(loss.item())
