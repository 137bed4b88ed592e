#!/bin/bash
#SBATCH --nodes=3
#SBATCH --gres=gpu:8                 # number of gpus
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
NLAYERS=22
TRAIN_SAMPLES=200_000
GPT_ARGS=" \
    --pp-partition-method 'type:transformer|embedding' \
    --num-layers $NLAYERS \
    --hidden-size 2048 \
    --num-attention-heads 16 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --micro-batch-size 2 \
    --rampup-batch-size 16 16 1_000 \
    --global-batch-size 64 \
    --train-samples $TRAIN_SAMPLES \
    --bf16 \
    --position-embedding-type alibi \
    --checkpoint-activations \
    --pad-vocab-size-to 250_880 \
    "
ZERO_STAGE=0
config_json="./ds_config.$SLURM_JOB_ID.json"
cat <<EOT > $config_json
{
  "train_batch_size": $GLOBAL_BATCH_SIZE,
  "zero_optimization": {
    "stage": $ZERO_STAGE
  },
}
EOT
DEEPSPEED_ARGS=" \
    --deepspeed \
    --deepspeed_config ${config_json} \
    --zero-stage ${ZERO_STAGE} \
    --deepspeed-activation-checkpointing \
    "
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT \
    "
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 6 \
    $GPT_ARGS \
    --data-impl mmap \
     $DEEPSPEED_ARGS \
    "
echo $CMD
clear; srun --wait=60 --jobid $SLURM_JOB_ID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a $LOGS_PATH/main_log.txt
