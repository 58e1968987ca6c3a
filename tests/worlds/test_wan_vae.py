

def test_a_vae_that_imagined_before_can_be_fitted_in_the_same_process() -> None:
    vae = WanVae(replace(VaeConfig.tiny(), base_dim=4, decoder_base_dim=4, latents_mean=(0.25,) * 12))
    video = torch.rand(1, 3, 1, 16, 16)
    with torch.inference_mode():
        encode_stream(vae, video)
    encode_stream(vae, video).sum().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in vae.parameters())
