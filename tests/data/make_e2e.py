#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""Make whole tiny models with several real PEFT adapters, and the logits that
PEFT computes when each request of one batch uses its own adapter.

OUT/<model>/            config.json, model.safetensors: the base model (float32)
OUT/<model>/adapters/X  PEFT adapters X = a, b, c
OUT/<model>/expected.safetensors
    input_ids     int32  [4, T]
    logits        float32 [4, T, vocab]: row 0 base model, rows 1..3 adapters a, b, c
    base_logits   float32 [4, T, vocab]: the base model on all four rows

    make_e2e.py OUT_DIR [SEED]
"""
import json, os, sys, torch
import transformers, peft
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

out, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
ATT = ["q_proj", "k_proj", "v_proj", "o_proj"]; FFN = ["gate_proj", "up_proj", "down_proj"]
C = lambda **k: LoraConfig(task_type="CAUSAL_LM", **k)

def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False))
def qwen3moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=320, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_experts=8, num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=128, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True))
plans = {
 "llama": (llama, {
    "a": C(r=8, lora_alpha=16, target_modules=ATT + FFN),
    "b": C(r=16, lora_alpha=32, use_rslora=True, target_modules=["q_proj", "v_proj"]),
    "c": C(r=4, lora_alpha=8, target_modules=["o_proj", "down_proj"], rank_pattern={"down_proj": 12}, alpha_pattern={"down_proj": 6},
           trainable_token_indices={"embed_tokens": [3, 5, 319], "lm_head": [9, 11]})}),
 "qwen3moe": (qwen3moe, {
    "a": C(r=4, lora_alpha=8, target_modules=ATT, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    "b": C(r=8, lora_alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=["mlp.gate.weight"]),
    "c": C(r=16, lora_alpha=16, target_modules=["k_proj", "v_proj"])}),
}
for name, (factory, adapters) in plans.items():
    d = os.path.join(out, name); os.makedirs(d, exist_ok=True)
    torch.manual_seed(seed); base = factory().float().eval()
    with torch.no_grad():
        for n, p in base.named_parameters():
            if p.dim() >= 2: p.mul_(3.0)
    base.save_pretrained(d)
    for junk in ("generation_config.json",):
        f = os.path.join(d, junk)
        if os.path.exists(f): os.remove(f)
    g = torch.Generator().manual_seed(seed + 5)
    ids = torch.randint(0, 320, (4, 14), generator=g); ids[3, 2:5] = torch.tensor([3, 5, 319]); ids[1, 2:5] = torch.tensor([3, 5, 319])
    with torch.no_grad(): base_logits = base(input_ids=ids).logits.clone()
    logits = base_logits.clone()
    for row, (a, cfg) in enumerate(adapters.items(), start=1):
        torch.manual_seed(seed); m = factory().float().eval(); m.load_state_dict(base.state_dict())
        pm = get_peft_model(m, cfg).float().eval()
        with torch.no_grad():
            for n, p in pm.named_parameters():
                if p.requires_grad:
                    if "lora_" in n: p.copy_(torch.randn(p.shape, generator=g) * 0.08)
                    elif "trainable_tokens" in n: p.copy_(torch.randn(p.shape, generator=g) * 0.1)
            logits[row] = pm(input_ids=ids[row:row+1]).logits[0]
        ad = os.path.join(d, "adapters", a); pm.save_pretrained(ad)
        if os.path.exists(os.path.join(ad, "README.md")): os.remove(os.path.join(ad, "README.md"))
        # read back through PEFT, so that the files alone are known to give these logits
        torch.manual_seed(seed); m2 = factory().float().eval(); m2.load_state_dict(base.state_dict())
        with torch.no_grad(): again = PeftModel.from_pretrained(m2, ad).eval()(input_ids=ids[row:row+1]).logits[0]
        print(name, a, "read-back max diff", float((again - logits[row]).abs().max()), "change", float((logits[row] - base_logits[row]).abs().max()))
    save_file({"input_ids": ids.to(torch.int32), "logits": logits.contiguous(), "base_logits": base_logits.contiguous()}, os.path.join(d, "expected.safetensors"))
json.dump({"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__, "seed": seed}, open(os.path.join(out, "versions.json"), "w"))
