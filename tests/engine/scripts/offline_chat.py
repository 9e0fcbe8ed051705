"""A first chat, as one writes it for vLLM: only the import and the model's name are ours."""

from minivllm import LLM, SamplingParams


def main():
    llm = LLM(model="smollm2")
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 24
    sampling_params.temperature = 0.0
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    outputs += llm.chat([conversation for _ in range(3)], SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=True)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")


if __name__ == "__main__":
    main()
