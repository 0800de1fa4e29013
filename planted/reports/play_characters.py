# /// cell
# cohort = "third"
# because = "The tokenizer's get_special_tokens_mask reads the property all_special_ids once per token, and the property rebuilds its list at each access; read it once into a set before the loop."
# thread = "https://github.com/huggingface/transformers/issues/47424"
# line = "return [1 if token_id in self.all_special_ids else 0 for token_id in token_ids_0]"
# callee = "transformers.PreTrainedTokenizer.all_special_ids"
# faster = 2.5
# ///
import random
import string

import torch
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizer

torch.manual_seed(0)
random.seed(0)
SPEAKERS = [f"<speaker_{i}>" for i in range(60)]


class CharacterTokenizer(PreTrainedTokenizer):
    def __init__(self, **kwargs):
        signs = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *" .,;:!?'-"]
        self.numbers = {s: i for i, s in enumerate(signs)}
        self.letters = dict(enumerate(signs))
        super().__init__(
            pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", **kwargs
        )

    @property
    def vocab_size(self):
        return len(self.numbers)

    def get_vocab(self):
        return {**self.numbers, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.numbers.get(token, 1)

    def _convert_id_to_token(self, index):
        return self.letters.get(index, "[UNK]")

    def get_special_tokens_mask(self, token_ids_0, token_ids_1=None, already_has_special_tokens=False):
        return [1 if token_id in self.all_special_ids else 0 for token_id in token_ids_0]


tokenizer = CharacterTokenizer()
tokenizer.add_special_tokens({"extra_special_tokens": SPEAKERS})
first_speaker = tokenizer.convert_tokens_to_ids(SPEAKERS[0])
weights = [8, 1, 3, 4, 12, 2, 2, 6, 7, 1, 1, 4, 2, 7, 8, 2, 1, 6, 6, 9, 3, 1, 2, 1, 2, 1, 18, 1, 2, 1, 1, 1, 1, 1, 1]
lines = [
    {"input_ids": [2, first_speaker + random.randrange(len(SPEAKERS)), *random.choices(range(5, 40), weights, k=125), 3]}
    for _ in range(2400)
]
collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
loader = torch.utils.data.DataLoader(lines, batch_size=32, shuffle=True, collate_fn=collator)
model = BertForMaskedLM(
    BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=128,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# %% the training cell
model.train()
for epoch in range(1):
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(epoch, step, f"{loss.item():.4f}")
print("last", loss.item())
