# What every pretraining run shares. Later files override.
custom_imports = dict(imports=['pretrain'])
runner_type = 'PretrainRunner'
default_scope = 'mmengine'

default_hooks = dict(
    schedule=dict(warmup=0.1, final_lr=0.01),
    monitor=dict(interval=10, statistics_interval=100),
    checkpoint=dict(interval=500, keep=2),
    bad_files=dict(max_rate=0.05),
)
visualizer = dict(type='Visualizer', vis_backends=[dict(type='TensorboardVisBackend')])
randomness = dict(seed=0)
log_level = 'INFO'
