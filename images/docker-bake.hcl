# docker buildx bake -f images/docker-bake.hcl builds the image for PCs, and for Raspberry Pis and Jetsons.
variable "IMAGE" { default = "horizonml/worker" }
variable "VERSION" { default = "dev" }
variable "REVISION" { default = "unknown" }
variable "TORCH_INDEX" { default = "https://download.pytorch.org/whl/cpu" }

group "default" {
  targets = ["worker"]
}

target "worker" {
  context    = "."
  dockerfile = "images/worker/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${IMAGE}:${VERSION}"]
  args = {
    TORCH_INDEX = TORCH_INDEX
    VERSION     = VERSION
    REVISION    = REVISION
  }
}
