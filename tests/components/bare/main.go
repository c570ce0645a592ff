// Command bare is the least device plugin that can be written with grpc-go and Kubernetes' own Go package: it registers at once, and answers
// every call with a reply that was made before it came. It knows no GPU. What it needs for a call, every device plugin in Go needs, NVIDIA's
// among them; so benchmarks measure it beside ours as what none of them can go below.
//
// BARE_DEVICES says how many devices it offers (8). PASS_DEVICE_SPECS=true adds device nodes to its replies, as it does with NVIDIA's plugin.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	endpoint = "nvidia-gpu.sock"
)

// plugin has every reply ready, by the number of devices that are asked for.
type plugin struct {
	kubelet.UnimplementedDevicePluginServer
	options   kubelet.DevicePluginOptions
	list      kubelet.ListAndWatchResponse
	allocated []*kubelet.AllocateResponse
	preferred []*kubelet.PreferredAllocationResponse
}

func main() {
	devices := 8
	if text := os.Getenv("BARE_DEVICES"); text != "" {
		var err error
		if devices, err = strconv.Atoi(text); err != nil {
			log.Fatalf("BARE_DEVICES: %v", err)
		}
	}
	listener, err := net.Listen("unix", kubelet.DevicePluginPath+endpoint)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	kubelet.RegisterDevicePluginServer(server, ready(devices, os.Getenv("PASS_DEVICE_SPECS") == "true"))
	go register()
	log.Fatal(server.Serve(listener))
}

// register tells kubelet of the resource. The connection stays, as it costs nothing to leave it.
func register() {
	connection, err := grpc.NewClient("unix://"+kubelet.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	request := &kubelet.RegisterRequest{
		Version:      kubelet.Version,
		Endpoint:     endpoint,
		ResourceName: resource,
		Options:      &kubelet.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	}
	if _, err := kubelet.NewRegistrationClient(connection).Register(context.Background(), request); err != nil {
		log.Fatal(err)
	}
}

// ready makes all replies. They name a GPU each of at most eight, however many devices lie on it: so NVIDIA's plugin words it for replicas.
func ready(devices int, nodes bool) *plugin {
	made := &plugin{options: kubelet.DevicePluginOptions{GetPreferredAllocationAvailable: true}}
	var ids []string
	for device := 0; device < devices; device++ {
		id := fmt.Sprintf("GPU-%08x-0000-0000-0000-000000000000", device)
		ids = append(ids, id)
		made.list.Devices = append(made.list.Devices, &kubelet.Device{
			ID:       id,
			Health:   kubelet.Healthy,
			Topology: &kubelet.TopologyInfo{Nodes: []*kubelet.NUMANode{{ID: int64(device % 2)}}},
		})
	}
	for count := 0; count <= devices; count++ {
		seen := min(count, 8)
		container := &kubelet.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids[:seen], ",")},
		}
		if nodes {
			names := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"}
			for gpu := 0; gpu < seen; gpu++ {
				names = append(names, fmt.Sprintf("nvidia%d", gpu))
			}
			for _, name := range names {
				path := "/dev/" + name
				container.Devices = append(container.Devices, &kubelet.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rw"})
			}
		}
		made.allocated = append(made.allocated, &kubelet.AllocateResponse{
			ContainerResponses: []*kubelet.ContainerAllocateResponse{container},
		})
		made.preferred = append(made.preferred, &kubelet.PreferredAllocationResponse{
			ContainerResponses: []*kubelet.ContainerPreferredAllocationResponse{{DeviceIDs: ids[:count]}},
		})
	}
	return made
}

func (p *plugin) GetDevicePluginOptions(context.Context, *kubelet.Empty) (*kubelet.DevicePluginOptions, error) {
	return &p.options, nil
}

func (p *plugin) ListAndWatch(_ *kubelet.Empty, stream grpc.ServerStreamingServer[kubelet.ListAndWatchResponse]) error {
	if err := stream.Send(&p.list); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) GetPreferredAllocation(_ context.Context, request *kubelet.PreferredAllocationRequest) (*kubelet.PreferredAllocationResponse, error) {
	return p.preferred[request.ContainerRequests[0].AllocationSize], nil
}

func (p *plugin) Allocate(_ context.Context, request *kubelet.AllocateRequest) (*kubelet.AllocateResponse, error) {
	return p.allocated[len(request.ContainerRequests[0].DevicesIds)], nil
}
