# docker buildx bake -f images/docker-bake.hcl [worker|cuda|jetson] builds the image for PCs and boards, for NVIDIA GPUs in
# PCs, or for those of Jetsons; see docs/containers.md. A list of what is inside (SBOM) and of how it was built (provenance)
# goes to the registry with every image, which BuildKit's container driver can do, and Docker's own without a containerd
# image store cannot; for that one, add --provenance=false --sbom=false.
variable "IMAGE" { default = "horizonml/worker" }
variable "VERSION" { default = "dev" }
variable "REVISION" { default = "unknown" } # of the sources
variable "CREATED" { default = timestamp() } # RFC 3339
variable "SOURCE" { default = "" } # where the sources are, as a URL
variable "TORCH_INDEX" { default = "https://download.pytorch.org/whl/cpu" }
# A build for an older or newer version of CUDA has another index, such as .../cu130 for +cu130.
variable "CUDA_INDEX" { default = "https://download.pytorch.org/whl/cu126" }
variable "CUDA_BUILD" { default = "+cu126" }
# PyTorch's own builds for CUDA 13 on arm64 contain code for Jetson Thor, and bring CUDA along, so that the base is the
# usual one. They contain none for Jetson Orin: name an index, a build and perhaps a base of NVIDIA's that fit its JetPack.
variable "JETSON_BASE" { default = "python:3.11-slim-bookworm" }
variable "JETSON_INDEX" { default = "https://download.pytorch.org/whl/cu130" }
variable "JETSON_BUILD" { default = "+cu130" }

group "default" {
  targets = ["worker"]
}

target "common" {
  context    = "."
  dockerfile = "images/worker/Dockerfile"
  attest     = ["type=provenance,mode=max", "type=sbom"]
  args = {
    VERSION  = VERSION
    REVISION = REVISION
    CREATED  = CREATED
    SOURCE   = SOURCE
  }
}

target "worker" {
  inherits  = ["common"]
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${IMAGE}:${VERSION}"]
  args      = { TORCH_INDEX = TORCH_INDEX }
}

target "cuda" {
  inherits  = ["common"]
  platforms = ["linux/amd64"]
  tags      = ["${IMAGE}:${VERSION}-cuda"]
  args      = { TORCH_INDEX = CUDA_INDEX, TORCH_BUILD = CUDA_BUILD }
}

target "jetson" {
  inherits  = ["common"]
  platforms = ["linux/arm64"]
  tags      = ["${IMAGE}:${VERSION}-jetson"]
  args      = { BASE_IMAGE = JETSON_BASE, TORCH_INDEX = JETSON_INDEX, TORCH_BUILD = JETSON_BUILD }
}
