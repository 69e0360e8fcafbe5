#!/usr/bin/env python3
# SPDX-License-Identifier: AGPL-3.0-only
"""Make small, real PEFT adapters and what PEFT itself computes with them.

Every adapter is built by `peft.get_peft_model` on a tiny randomly initialised
`transformers` model and written by `save_pretrained`, so names, configs and
dtypes are PEFT's own. Beside each adapter, `config.json` is the base model's and `expected.safetensors` holds for a
few adapted modules the input `x` [rows, in], the adapted-minus-base output
`delta` [rows, out] (float32, computed by PEFT with the adapter enabled and
disabled), and `base` [rows, out]; for a parameter adapted through `target_parameters`,
`MODULE|PARAMETER|delta_weight` in the parameter's own shape, and that shape.

    make_fixtures.py OUT_DIR [SEED] [CASE ...]
"""
import json, os, sys, torch, traceback, shutil
import transformers, peft
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file, load_file
from transformers import (LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM,
                          Qwen3MoeConfig, Qwen3MoeForCausalLM, GPT2Config, GPT2LMHeadModel,
                          MixtralConfig, MixtralForCausalLM)

out_root = sys.argv[1]
seed0 = int(sys.argv[2]) if len(sys.argv) > 2 else 1
only = set(sys.argv[3:])

def llama(tie=False):
    return LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=160,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=128, tie_word_embeddings=tie))
def qwen3(tie=True):
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=320, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=128, tie_word_embeddings=tie))
def qwen3moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=320, hidden_size=64, intermediate_size=96,
        moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        decoder_sparse_step=1, mlp_only_layers=[]))
def mixtral():
    return MixtralForCausalLM(MixtralConfig(vocab_size=320, hidden_size=64, intermediate_size=48,
        num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128))
def qwen3next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    return Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=320, hidden_size=64, intermediate_size=96,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=0, moe_intermediate_size=32, max_position_embeddings=128,
        mlp_only_layers=[0,1,2,3]))
def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=128))

def phi3():
    from transformers import Phi3Config, Phi3ForCausalLM
    return Phi3ForCausalLM(Phi3Config(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2))
class PerExpert(torch.nn.Module):
    """Experts as separate linears, as MoE checkpoints before fused parameters had them, with a shared expert and a router."""
    class Mlp(torch.nn.Module):
        def __init__(self, h, i):
            super().__init__(); L = lambda a, b: torch.nn.Linear(a, b, bias=False)
            self.gate_proj, self.up_proj, self.down_proj = L(h, i), L(h, i), L(i, h)
        def forward(self, x): return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
    class Moe(torch.nn.Module):
        def __init__(self, h, i, e, k):
            super().__init__(); self.k = k; self.gate = torch.nn.Linear(h, e, bias=False)
            self.experts = torch.nn.ModuleList(PerExpert.Mlp(h, i) for _ in range(e)); self.shared_expert = PerExpert.Mlp(h, i)
        def forward(self, x):
            w, ix = torch.softmax(self.gate(x), -1).topk(self.k, -1); w = w / w.sum(-1, keepdim=True); y = self.shared_expert(x)
            for e, m in enumerate(self.experts): y = y + m(x) * (w * (ix == e)).sum(-1, keepdim=True)
            return y
    class Layer(torch.nn.Module):
        def __init__(self): super().__init__(); self.mlp = PerExpert.Moe(64, 48, 4, 2)
    class Config(dict):
        def to_json_file(self, f, use_diff=False): json.dump(self, open(f, "w"), indent=1)
    class Out: pass
    def __init__(self):
        super().__init__(); self.model = torch.nn.Module(); self.model.embed_tokens = torch.nn.Embedding(320, 64)
        self.model.layers = torch.nn.ModuleList(PerExpert.Layer() for _ in range(2)); self.lm_head = torch.nn.Linear(64, 320, bias=False)
        self.config = PerExpert.Config(model_type="qwen2_moe", vocab_size=320, hidden_size=64, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=48, shared_expert_intermediate_size=48, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    def forward(self, input_ids=None, **kw):
        x = self.model.embed_tokens(input_ids)
        for l in self.model.layers: x = x + l.mlp(x)
        o = PerExpert.Out(); o.logits = self.lm_head(x); return o
ATT = ["q_proj", "k_proj", "v_proj", "o_proj"]; FFN = ["gate_proj", "up_proj", "down_proj"]
C = lambda **k: LoraConfig(task_type="CAUSAL_LM", **k)
cases = {
 # name: (model factory, config, save dtype, note)
 "llama_r8_all": (llama, C(r=8, lora_alpha=16, target_modules=ATT+FFN), torch.float32, "plain, every linear"),
 "llama_r16_bf16": (llama, C(r=16, lora_alpha=32, target_modules=ATT+FFN), torch.bfloat16, "saved in bf16"),
 "llama_r16_f16_qv": (llama, C(r=16, lora_alpha=8, target_modules=["q_proj","v_proj"]), torch.float16, "saved in f16, q and v only"),
 "llama_r12_rslora": (llama, C(r=12, lora_alpha=24, use_rslora=True, target_modules=ATT+FFN), torch.float32, "rank not a multiple of 8, alpha/sqrt(r)"),
 "llama_r1": (llama, C(r=1, lora_alpha=1, target_modules=["q_proj","down_proj"]), torch.float32, "rank 1"),
 "llama_r64": (llama, C(r=64, lora_alpha=16, target_modules=ATT+FFN), torch.bfloat16, "rank equal to hidden size"),
 "llama_patterns": (llama, C(r=8, lora_alpha=16, target_modules=ATT+FFN, rank_pattern={"q_proj":4,"layers.1.mlp.down_proj":16}, alpha_pattern={"q_proj":32,"up_proj":1}), torch.float32, "rank_pattern and alpha_pattern"),
 "llama_layers": (llama, C(r=8, lora_alpha=16, target_modules=ATT, layers_to_transform=[0,2]), torch.float32, "layers 0 and 2 only"),
 "llama_all_linear": (llama, C(r=8, lora_alpha=16, target_modules="all-linear"), torch.float32, "target_modules is the string all-linear"),
 "llama_lora_bias": (llama, C(r=8, lora_alpha=16, target_modules=["q_proj","o_proj"], lora_bias=True), torch.float32, "lora_B carries a bias"),
 "llama_bias_all": (llama, C(r=8, lora_alpha=16, target_modules=["q_proj"], bias="all"), torch.float32, "bias=all on a model without biases"),
 "llama_dora": (llama, C(r=8, lora_alpha=16, target_modules=["q_proj","v_proj"], use_dora=True), torch.float32, "DoRA: a magnitude vector, not a plain delta"),
 "llama_save_head": (lambda: llama(False), C(r=8, lora_alpha=16, target_modules=["q_proj"], modules_to_save=["lm_head","embed_tokens"]), torch.float32, "untied; whole embed_tokens and lm_head saved"),
 "qwen3_trainable_tokens_tied": (lambda: qwen3(True), C(r=8, lora_alpha=16, target_modules=ATT, trainable_token_indices=[3, 7, 319]), torch.float32, "tied head; three retrained token rows"),
 "llama_trainable_tokens_untied": (lambda: llama(False), C(r=8, lora_alpha=16, target_modules=["q_proj"], trainable_token_indices={"embed_tokens":[0,5],"lm_head":[9]}), torch.float32, "untied; different rows in embedding and head"),
 "llama_embed_lora": (llama, C(r=8, lora_alpha=16, target_modules=["q_proj","embed_tokens"]), torch.float32, "lora_embedding_A/B"),
 "qwen3moe_attn": (qwen3moe, C(r=8, lora_alpha=16, target_modules=ATT), torch.float32, "MoE model, attention only"),
 "qwen3moe_fused_experts": (qwen3moe, C(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj","mlp.experts.down_proj"]), torch.float32, "fused 3-D expert parameters through target_parameters"),
 "qwen3moe_router": (qwen3moe, C(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"]), torch.float32, "router weight through target_parameters"),
 "qwen3next_hybrid": (qwen3next, C(r=8, lora_alpha=16, target_modules=ATT+["out_proj"]), torch.float32, "hybrid: gated full attention (q_proj twice as wide) and linear attention out_proj"),
 "per_expert_linears": (PerExpert, LoraConfig(r=4, lora_alpha=8, target_modules=["gate_proj", "up_proj", "down_proj", "gate"]), torch.float32, "experts as separate linears, shared expert, router"),
 "phi3_fused_qkv": (phi3, C(r=8, lora_alpha=16, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]), torch.float32, "fused qkv_proj and gate_up_proj linears"),
 "llama_lm_head": (llama, C(r=8, lora_alpha=16, target_modules=["q_proj","lm_head"]), torch.float32, "LoRA on the head, which brings a copy of the base's"),
 "llama_expressions": (llama, C(r=8, lora_alpha=16.5, target_modules=r"model\.layers\.[02]\..*(q|k|up|down)_proj", rank_pattern={r"^model.layers.0.self_attn.q_proj":4, r"layers\.\d+\.mlp\.(up|gate)_proj":2, ".*k_proj":6}, alpha_pattern={r"layers\.2\..*":-3, "q_proj|k_proj":5}), torch.float32, "regular expressions as targets and as keys of patterns"),
 "llama_olora": (llama, C(r=8, lora_alpha=16, target_modules=["q_proj"], init_lora_weights="olora"), torch.float32, "an initialisation that changes the base"),
 "gpt2_fan_in_fan_out": (gpt2, C(r=8, lora_alpha=16, target_modules=["c_attn","c_fc","c_proj"], fan_in_fan_out=True), torch.float32, "weights stored [in, out]; a model of no known family"),
 "qwen3moe_all_linear": (qwen3moe, C(r=4, lora_alpha=8, target_modules="all-linear"), torch.float32, "all-linear, which PEFT turns into target_parameters with a rank_pattern of their own"),
}
index = {}
for i, (name, (factory, cfg, dtype, note)) in enumerate(cases.items()):
    if only and name not in only: continue
    d = os.path.join(out_root, name)
    try:
        torch.manual_seed(seed0 * 1000 + i)
        model = factory().float()
        pm = get_peft_model(model, cfg).float()
        g = torch.Generator().manual_seed(seed0 * 77 + i)
        with torch.no_grad():
            for n, p in pm.named_parameters():
                if p.requires_grad:
                    if "lora_" in n: p.copy_(torch.randn(p.shape, generator=g) * 0.05)
                    elif "trainable_tokens" in n: p.copy_(torch.randn(p.shape, generator=g) * 0.3)
                    elif "modules_to_save" in n: p.add_((torch.rand(p.shape[0], 1, generator=g) < 0.1).float() * torch.randn(p.shape, generator=g) * 0.2)
                    elif "magnitude" in n: p.mul_(1 + 0.1 * torch.rand(p.shape, generator=g))
                    # round through the saved dtype, so that PEFT computes with what the file holds
                    p.copy_(p.to(dtype).float())
        pm.save_pretrained(d, safe_serialization=True)
        model.config.to_json_file(os.path.join(d, "config.json"), use_diff=False)
        f = os.path.join(d, "adapter_model.safetensors")
        t = {k: (v.to(dtype) if v.is_floating_point() else v).contiguous() for k, v in load_file(f).items()}
        save_file(t, f, metadata={"format": "pt"})
        readme = os.path.join(d, "README.md")
        if os.path.exists(readme): os.remove(readme)
        exp = {}
        from peft.tuners.lora import LoraLayer
        from peft.tuners.lora.layer import Linear as LL
        for mn, mod in pm.named_modules():
            if isinstance(mod, LL) and mod.lora_A and "magnitude" not in mn:
                wi = getattr(mod, "in_features", None)
                if not wi: continue
                x = torch.randn(3, wi, generator=g)
                with torch.no_grad():
                    base = mod.base_layer(x); on = mod(x)
                key = mn.replace("base_model.model.", "", 1)
                exp[key + "|x"] = x; exp[key + "|base"] = base.contiguous(); exp[key + "|delta"] = (on - base).contiguous()
        for mn, mod in pm.named_modules():
            if type(mod).__name__ == "ParamWrapper":
                key = mn.replace("base_model.model.", "", 1) + "|" + mod.parameter_name
                exp[key + "|delta_weight"] = mod.get_delta_weight("default").detach().float().contiguous()
                exp[key + "|base_weight_shape"] = torch.tensor(list(mod.get_param().shape), dtype=torch.int32)
        ids = torch.randint(0, 320, (2, 9), generator=g)
        if name.find("trainable_tokens") >= 0 or name.find("save_head") >= 0: ids[0, :4] = torch.tensor([3, 7, 319, 5])
        if "alora" in name: ids[:, 4:6] = torch.tensor([7, 8])
        with torch.no_grad():
            try: lo = pm(input_ids=ids).logits
            except Exception: lo = pm(ids).logits
            with pm.disable_adapter(): lb = pm(input_ids=ids).logits
        exp["model|input_ids"] = ids.to(torch.int32); exp["model|logits"] = lo.contiguous(); exp["model|base_logits"] = lb.contiguous()
        save_file({k: v.contiguous() for k, v in exp.items()}, os.path.join(d, "expected.safetensors"))
        index[name] = {"note": note, "model": type(model).__name__, "dtype": str(dtype).split(".")[1], "tensors": len(t), "modules_with_expected": sum(k.endswith("|x") for k in exp), "max_abs_logit_change": float((lo - lb).abs().max())}
        # the base model's own weights only where an overlay needs them
        if any(s in name for s in ("trainable_tokens", "save_head", "embed_lora", "fused_experts", "router", "dora")):
            sd = {k: v.contiguous().clone() for k, v in factory().state_dict().items()} if False else None
            base = {k.replace(".base_layer", ""): v.contiguous().clone() for k, v in pm.get_base_model().state_dict().items()
                    if ("lora_" not in k and "modules_to_save" not in k and "token_adapter" not in k.replace("token_adapter.base_layer","") and any(s in k for s in ("embed_tokens", "lm_head", "experts", "mlp.gate", "layers.0.self_attn.q_proj")))}
            save_file(base, os.path.join(d, "base_subset.safetensors"))
    except Exception as e:
        index[name] = {"note": note, "failed": repr(e)[:300]}
        shutil.rmtree(d, ignore_errors=True); traceback.print_exc(limit=2)
index["_versions"] = {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__, "seed": seed0}
json.dump(index, open(os.path.join(out_root, "index.json"), "w"), indent=1)
print(json.dumps(index, indent=1))
