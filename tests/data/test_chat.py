# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest

from hf_qrl.data.chat import ChatRenderer, check_messages, training_chat_template, window_messages


SYSTEM = {"role": "system", "content": "s"}


def turn(user, assistant):
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def renderer(tokenizer, **kwargs):
    eos = (tokenizer.eos_token_id,)
    return ChatRenderer(tokenizer, training_chat_template(tokenizer), "Row 2", eos_token_ids=eos, **kwargs)


def own_texts(tokenizer, messages, turns, **kwargs):
    input_ids, spans = renderer(tokenizer).render(messages, turns, **kwargs)
    return tokenizer.decode(input_ids), [tokenizer.decode(input_ids[start:end]) for start, end in spans]


class TestWindowMessages:
    MESSAGES = [SYSTEM, *turn("a", "b"), *turn("c", "d"), {"role": "user", "content": "e"}]

    @pytest.mark.parametrize(
        "window, contents", [(1, "se"), (2, "scde"), (3, "sabcde"), (9, "sabcde"), (None, "sabcde")]
    )
    def test_window(self, window, contents):
        assert "".join(m["content"] for m in window_messages(self.MESSAGES, window)) == contents

    def test_first_turn(self):
        assert window_messages(self.MESSAGES[:2], 1) == self.MESSAGES[:2]
        assert window_messages(self.MESSAGES[1:2], 1) == self.MESSAGES[1:2]

    def test_observation_of_several_messages_stays_together(self):
        messages = [*turn("a", "b"), {"role": "tool", "content": "c"}, {"role": "user", "content": "d"}]
        assert [m["content"] for m in window_messages(messages, 1)] == ["c", "d"]

    def test_ends_with_assistant_raises(self):
        with pytest.raises(ValueError, match="must end with another role"):
            window_messages(turn("a", "b"), 1)

    def test_window_below_one_raises(self):
        with pytest.raises(ValueError, match="`history_window` must be at least 1, got 0"):
            window_messages(self.MESSAGES, 0)


class TestCheckMessages:
    @pytest.mark.parametrize(
        "messages, match",
        [
            ([], "`messages` is empty"),
            (None, "must be a list of dicts"),
            ("a", "must be a list of dicts"),
            (["a"], "must be a list of dicts"),
            ([{"role": "robot", "content": "a"}], "unknown role 'robot'"),
            ([{"content": "a"}], "unknown role None"),
        ],
    )
    def test_bad_messages_raise(self, messages, match):
        with pytest.raises(ValueError, match=f"Row 1: .*{match}"):
            check_messages(messages, "messages", "Row 1")

    def test_entries_that_arrow_filled_in_are_dropped(self):
        """A column of structs has the keys of all its rows, None where a row lacks one."""
        calls = [{"function": {"name": "weather", "arguments": {"city": "P", "zip": None}}, "id": None}]
        messages = [
            {"role": "user", "content": "hi", "tool_calls": None},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        assert check_messages(messages, "messages", "Row 0") == [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "P"}}}],
            },
        ]


class TestTrainingChatTemplate:
    def test_tagged_template_is_kept(self, tagged_tokenizer):
        assert training_chat_template(tagged_tokenizer) == tagged_tokenizer.chat_template

    def test_unknown_template_is_kept(self, tokenizer):
        assert training_chat_template(tokenizer) == tokenizer.chat_template

    def test_known_template_is_replaced_by_trls(self, make_tokenizer):
        import trl.chat_template_utils as templates

        tokenizer = make_tokenizer(templates.qwen2_5_chat_template)
        assert training_chat_template(tokenizer) == templates.qwen2_5_training_chat_template
        messages = [SYSTEM, *turn("a", "b"), *turn("c", "d")]
        assert own_texts(tokenizer, messages, [2, 4])[1] == ["b<|im_end|>", "d<|im_end|>"]

    def test_no_template_raises(self, no_template_tokenizer):
        with pytest.raises(ValueError, match="the tokenizer has no chat template"):
            training_chat_template(no_template_tokenizer)


class TestChatRenderer:
    def test_own_tokens(self, chat_tokenizer):
        messages = [SYSTEM, *turn("a", "bc"), *turn("d", "e")]
        text, own = own_texts(chat_tokenizer, messages, [2, 4])
        assert own == ["bc<|im_end|>", "e<|im_end|>"]
        assert text == chat_tokenizer.apply_chat_template(messages, tokenize=False)

    def test_prompt_is_the_context_of_generation(self, chat_tokenizer):
        messages = [*turn("a", "bc"), *turn("d", "e")]
        input_ids, spans = renderer(chat_tokenizer).render(messages, [1, 3])
        for i, (start, _) in zip([1, 3], spans, strict=True):
            prompt = chat_tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=True)
            assert input_ids[:start] == prompt["input_ids"]

    def test_assistant_messages_that_are_context(self, chat_tokenizer):
        assert own_texts(chat_tokenizer, [*turn("a", "b"), *turn("c", "d")], [3])[1] == ["d<|im_end|>"]

    def test_ends_with_observation(self, chat_tokenizer):
        text, own = own_texts(chat_tokenizer, [*turn("a", "b"), {"role": "user", "content": "c"}], [1])
        assert own == ["b<|im_end|>"]
        assert text.endswith("c<|im_end|>\n<|im_start|>assistant\n")

    def test_cut_while_speaking(self, chat_tokenizer):
        text, own = own_texts(chat_tokenizer, [*turn("a", "b"), *turn("c", "de")], [1, 3], cut_while_speaking=True)
        assert own == ["b<|im_end|>", "de"]
        assert text.endswith("assistant\nde")

    def test_environment_is_rendered_as_user(self, chat_tokenizer):
        messages = turn("a", "b")
        environment = [{"role": "environment", "content": "a"}, messages[1]]
        assert renderer(chat_tokenizer).render(messages, [1]) == renderer(chat_tokenizer).render(environment, [1])

    def test_tools_and_template_variables(self, tagged_tokenizer):
        tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
        assert tagged_tokenizer.decode(renderer(tagged_tokenizer, tools=tools).prompt(turn("a", "b")[:1])).startswith(
            "[add]"
        )
        template = "{{ mood }}" + tagged_tokenizer.chat_template
        happy = ChatRenderer(tagged_tokenizer, template, "Row 0", template_kwargs={"mood": ":)"})
        input_ids, spans = happy.render(turn("a", "b"), [1])
        assert tagged_tokenizer.decode(input_ids).startswith(":)")
        assert tagged_tokenizer.decode(input_ids[slice(*spans[0])]) == "b<|im_end|>"

    def test_no_prefix_raises(self, no_prefix_tokenizer):
        with pytest.raises(ValueError, match="Row 2: .*not a prefix.*training chat template"):
            renderer(no_prefix_tokenizer).render([*turn("a", "b"), *turn("c", "d")], [1, 3])

    def test_tags_that_do_not_cover_the_answer_raise(self, make_tokenizer):
        tokenizer = make_tokenizer(
            "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}{% generation %}{% endgeneration %}"
        )
        with pytest.raises(ValueError, match="Row 2: message 1 has no tokens of the assistant"):
            renderer(tokenizer).render(turn("a", "b"), [1])

    def test_starts_with_assistant_raises(self, chat_tokenizer):
        with pytest.raises(ValueError, match="Row 2: the conversation starts with an assistant message"):
            renderer(chat_tokenizer).render([turn("a", "b")[1]], [0])

    @pytest.mark.parametrize("cut_while_speaking", [False, True])
    def test_template_error_names_the_row(self, chat_tokenizer, cut_while_speaking):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
        with pytest.raises(ValueError, match="Row 2: the chat template cannot render the messages"):
            renderer(chat_tokenizer).render(messages, [1], cut_while_speaking)
