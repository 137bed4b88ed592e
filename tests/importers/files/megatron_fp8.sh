#!/bin/bash
# A comment with --num-layers 99 in it
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=2; PP="4"
DTYPE="fp8"
OUT=$1
LAUNCH="torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES"
MODEL_ARGS=(
    --num-layers 16          # a comment inside an array
    --hidden-size 2048
    --ffn-hidden-size 8192
    --num-attention-heads 16
    --group-query-attention --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --vocab-size 32000 --tokenizer-type Llama2Tokenizer --make-vocab-size-divisible-by 128
    --attention-backend flash
)
PRECISION=(--bf16 --grad-reduce-in-bf16)
if [[ "$DTYPE" == "fp8" ]]; then
    PRECISION+=("--fp8-format hybrid" "--fp8-recipe tensorwise" --fp8-param-gather)
elif [ $DTYPE = fp16 ]; then
    PRECISION=(--fp16)
fi
STEPS=(
    #  --train-iters 100 \
    --train-iters 500 \
    #--save $OUT \
    --eval-iters 10
)
case $TP in
  1|4) EXTRA="--context-parallel-size 2" ;;
  *)   EXTRA="--sequence-parallel --tp-comm-overlap" ;;
esac
$LAUNCH pretrain_gpt.py "${MODEL_ARGS[@]}" ${PRECISION[@]} $EXTRA \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP --num-layers-per-virtual-pipeline-stage 2 \
    --micro-batch-size 1 --global-batch-size 64 \
    --use-distributed-optimizer --overlap-grad-reduce \
    --recompute-granularity full --recompute-method block --recompute-num-layers 1 \
    ${STEPS[@]} --lr 1e-4 --save $OUT --made-up-flag 3
