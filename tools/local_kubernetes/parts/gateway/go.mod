module rayloom.dev/e2e/gateway

go 1.25.0

require sigs.k8s.io/gateway-api v1.4.0
