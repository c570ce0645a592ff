{{- /* The DaemonSet of the plugin: for nodes with MIG, or for all others. */}}
{{- define "gantry.plugin.daemonSet" -}}
{{- $root := .root -}}
{{- $plugin := $root.Values.plugin -}}
{{- $name := .mig | ternary "gantry-plugin-mig" "gantry-plugin" -}}
{{- $kubelet := trimSuffix "/" $plugin.kubeletRoot -}}
{{- $driverRoot := trimSuffix "/" $plugin.driverRoot -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels: &labels
    app.kubernetes.io/name: {{ $name }}
    app.kubernetes.io/part-of: gantry
spec:
  selector:
    matchLabels: *labels
  updateStrategy:
    type: RollingUpdate
    rollingUpdate:
      # A node without its plugin for a moment is harmless (running pods keep their devices), but new pods wait.
      maxUnavailable: {{ $plugin.maxUnavailable }}
  template:
    metadata:
      labels: *labels
      {{- with $plugin.podAnnotations }}
      annotations: {{ toJson . }}
      {{- end }}
    spec:
      serviceAccountName: gantry-plugin
      {{- include "gantry.pullSecrets" $root }}
      priorityClassName: {{ $plugin.priorityClassName }}
      {{- if .mig }}
      # plugin.yaml's stays off these nodes.
      nodeSelector:
        gantry.dev/mig: "true"
        {{- with $plugin.nodeSelector }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: gantry.dev/gpu, operator: NotIn, values: ["false"]}
                  # While the GPU operator unloads the driver or changes the MIG layout, as in plugin.yaml.
                  - {key: nvidia.com/gpu.deploy.client, operator: NotIn, values: &paused [paused-for-driver-upgrade, paused-for-mig-change, paused-for-vgpu-change]}
                  - {key: nvidia.com/gpu.deploy.device-plugin, operator: NotIn, values: *paused}
      {{- else }}
      {{- with $plugin.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      # On nodes where the GPU operator, node-feature-discovery or the cloud found a GPU, or that are labelled
      # gantry.dev/gpu=true; never on nodes labelled gantry.dev/gpu=false. Elsewhere it would wait for a driver, report
      # that, and advertise nothing.
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: gantry.dev/gpu, operator: In, values: ["true"]}
                  - &not-mig {key: gantry.dev/mig, operator: NotIn, values: ["true"]} # those are plugin-mig.yaml's
                  # NVML must be closed while the GPU operator unloads the driver or changes the MIG layout. The first
                  # label removes pods that are not the operator's (since 26.7), the second the operator's own plugin,
                  # which this one replaces.
                  - &not-paused {key: nvidia.com/gpu.deploy.client, operator: NotIn, values: &paused [paused-for-driver-upgrade, paused-for-mig-change, paused-for-vgpu-change]}
                  - &nor-paused {key: nvidia.com/gpu.deploy.device-plugin, operator: NotIn, values: *paused}
              - matchExpressions:
                  - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
                  - &not-kept-out {key: gantry.dev/gpu, operator: NotIn, values: ["false"]}
                  - *not-mig
                  - *not-paused
                  - *nor-paused
              - matchExpressions:
                  - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
                  - *not-kept-out
                  - *not-mig
                  - *not-paused
                  - *nor-paused
              # GKE, where its own device plugin is off. EKS Auto Mode has no term, because its plugin cannot be turned off.
              - matchExpressions:
                  - {key: gke-no-default-nvidia-gpu-device-plugin, operator: In, values: ["true"]}
                  - {key: cloud.google.com/gke-accelerator, operator: Exists}
                  - *not-kept-out
                  - *not-mig
                  - *not-paused
                  - *nor-paused
              # AKS.
              - matchExpressions:
                  - {key: kubernetes.azure.com/accelerator, operator: In, values: [nvidia]}
                  - *not-kept-out
                  - *not-mig
                  - *not-paused
                  - *nor-paused
              # Karpenter on EKS.
              - matchExpressions:
                  - {key: karpenter.k8s.aws/instance-gpu-manufacturer, operator: In, values: [nvidia]}
                  - *not-kept-out
                  - *not-mig
                  - *not-paused
                  - *nor-paused
              # What cluster-autoscaler requires of a group with GPUs on AWS.
              - matchExpressions:
                  - {key: k8s.amazonaws.com/accelerator, operator: Exists}
                  - *not-kept-out
                  - *not-mig
                  - *not-paused
                  - *nor-paused
      {{- end }}
      {{- with $plugin.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- else }}
      # If NVIDIA's runtime is not containerd's default, name its class:
      # runtimeClassName: nvidia
      {{- end }}
      tolerations:
        {{- toYaml $plugin.tolerations | nindent 8 }}
      # Long enough to end ListAndWatch streams and remove the sockets.
      terminationGracePeriodSeconds: 10
      containers:
        - name: plugin
          image: {{ include "gantry.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          {{- if and .mig $plugin.migLayouts }}
          args: {{ append (include "gantry.plugin.args" $root | fromJsonArray) "--mig-layouts=/etc/gantry/mig-layouts/config.yaml" | toJson }}
          {{- else }}
          args: {{ include "gantry.plugin.args" $root }}
          {{- end }}
          env:
            - name: NODE_NAME
              valueFrom:
                fieldRef:
                  fieldPath: spec.nodeName
            # The owner of the NodeFeature object of --labels=node-feature.
            - name: NAMESPACE
              valueFrom:
                fieldRef:
                  fieldPath: metadata.namespace
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            # Makes the NVIDIA container runtime add the driver's libraries, including NVML, to this container.
            - name: NVIDIA_VISIBLE_DEVICES
              value: all
            # Compute as well, because it creates /dev/nvidia-uvm, which this process needs for containers
            # (passDeviceSpecs, CDI).
            - name: NVIDIA_DRIVER_CAPABILITIES
              value: compute,utility
            {{- if .mig }}
            # Makes it add the MIG devices of every GPU as well, with CAP_SYS_ADMIN below.
            - name: NVIDIA_MIG_MONITOR_DEVICES
              value: all
            {{- if $plugin.migLayouts }}
            # Lets it change the MIG layout of every GPU, with CAP_SYS_ADMIN below.
            - name: NVIDIA_MIG_CONFIG_DEVICES
              value: all
            {{- end }}
            {{- end }}
            {{- if $driverRoot }}
            - name: NVIDIA_DRIVER_ROOT
              value: {{ $driverRoot }}
            {{- end }}
            {{- with $plugin.kubeletConfigFile }}
            - name: GANTRY_KUBELET_CONFIG
              value: {{ . }}
            {{- end }}
            {{- if eq $plugin.readPods "kubelet-credential" }}
            - name: GANTRY_POD_KUBECONFIG
              value: {{ $plugin.kubeletKubeconfig }}
            {{- end }}
            {{- with $plugin.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: http
              containerPort: 9410
          livenessProbe:
            httpGet: {path: /healthz, port: http}
            periodSeconds: 10
            failureThreshold: 6
          # A node with nothing to serve (no driver, no GPU that may be served; /readyz says so) is ready as well:
          # otherwise a rollout would wait for it for ever.
          readinessProbe:
            httpGet: {path: /settledz, port: http}
            periodSeconds: 5
          resources: {{ toJson $plugin.resources }}
          securityContext:
            # Root, because kubelet's sockets belong to root.
            {{- if .mig }} allowPrivilegeEscalation is not set: Kubernetes takes it
            # for true with this capability.
            {{- else }} Without capabilities or privileges beyond that
            # (plugin-mig.yaml has one).
            {{- end }}
            runAsUser: 0
            {{- if not .mig }}
            allowPrivilegeEscalation: false
            {{- end }}
            readOnlyRootFilesystem: true
            {{- if .mig }}
            capabilities: {drop: [ALL], add: [SYS_ADMIN]}
            {{- else }}
            capabilities: {drop: [ALL]}
            {{- end }}
            seccompProfile: {type: RuntimeDefault}
            {{- with $plugin.seLinuxOptions }}
            seLinuxOptions: {{ toJson . }}
            {{- end }}
          volumeMounts:
            - {name: device-plugins, mountPath: /var/lib/kubelet/device-plugins}
            - {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources}
            - {name: cdi, mountPath: /var/run/cdi}
            {{- if $plugin.ncclTopology }}
            - {name: nccl, mountPath: /var/lib/gantry/nccl}
            {{- end }}
            - {name: cgroup, mountPath: /sys/fs/cgroup, readOnly: true}
            - {name: driver-usr, mountPath: /driver-root/usr, readOnly: true}
            - {name: driver-dev, mountPath: /driver-root/dev, readOnly: true}
            - {name: driver-etc, mountPath: /driver-root/etc, readOnly: true}
            - {name: driver-udev, mountPath: /driver-root/run/udev, readOnly: true}
            - {name: driver-persistenced, mountPath: /driver-root/run/nvidia-persistenced, readOnly: true}
            - {name: driver-fabricmanager, mountPath: /driver-root/run/nvidia-fabricmanager, readOnly: true}
            {{- if and .mig $plugin.migLayouts }}
            - {name: mig-layouts, mountPath: /etc/gantry/mig-layouts, readOnly: true}
            {{- end }}
            {{- with $plugin.kubeletConfigFile }}
            - {name: kubelet-config, mountPath: {{ . }}, readOnly: true}
            {{- end }}
            {{- if eq $plugin.readPods "kubelet-credential" }}
            - {name: kubelet-conf, mountPath: {{ $plugin.kubeletKubeconfig }}, readOnly: true}
            - {name: kubelet-pki, mountPath: /var/lib/kubelet/pki, readOnly: true}
            {{- end }}
      volumes:
        - {name: device-plugins, hostPath: {path: {{ $kubelet }}/device-plugins, type: Directory}}
        # The folder, not the socket: kubelet makes a new socket when it restarts.
        - {name: pod-resources, hostPath: {path: {{ $kubelet }}/pod-resources, type: Directory}}
        - {name: cdi, hostPath: {path: /var/run/cdi, type: DirectoryOrCreate}}
        {{- if $plugin.ncclTopology }}
        # Kubelet mounts the files in it into containers, so it has the same path in this pod.
        - {name: nccl, hostPath: {path: /var/lib/gantry/nccl, type: DirectoryOrCreate}}
        {{- end }}
        # Shows when the processes of a force-deleted pod are gone.
        - {name: cgroup, hostPath: {path: /sys/fs/cgroup, type: Directory}}
        # The paths below are read for the driver's files that CDI (DEVICE_LIST_STRATEGY) adds to containers, and for
        # NVML: libraries and programs, device nodes, settings (Vulkan, GPUDirect Storage), Debian's alternatives,
        # udev's database, the sockets of the driver's daemons. For a driver in another root (NVIDIA_DRIVER_ROOT, such
        # as the GPU operator's /run/nvidia/driver) put that before every path. Other parts of the host are not read,
        # and only NVML is opened.
        #
        # The host's whole root is not mounted, because it has the secrets of all pods. /run is not mounted, because its
        # sockets, containerd's among them, accept connections also when mounted read-only. /etc is mounted as a whole,
        # because a single file cannot be mounted if it may be missing. Missing folders in /run are created empty and
        # last until the next boot. If a daemon removes its folder at a restart (nvidia-persistenced's unit does), its
        # socket is missing from the specification until this pod is recreated.
        #
        # /etc has files that only root may read (/etc/shadow, on a control plane the keys of /etc/kubernetes). Without
        # Vulkan or GPUDirect Storage by CDI and without programs by Debian's alternatives, driver-etc can be removed.
        - {name: driver-usr, hostPath: {path: {{ $driverRoot }}/usr, type: Directory}}
        - {name: driver-dev, hostPath: {path: {{ $driverRoot }}/dev, type: Directory}}
        - {name: driver-etc, hostPath: {path: {{ $driverRoot }}/etc, type: Directory}}
        - {name: driver-udev, hostPath: {path: {{ $driverRoot }}/run/udev, type: DirectoryOrCreate}}
        - {name: driver-persistenced, hostPath: {path: {{ $driverRoot }}/run/nvidia-persistenced, type: DirectoryOrCreate}}
        - {name: driver-fabricmanager, hostPath: {path: {{ $driverRoot }}/run/nvidia-fabricmanager, type: DirectoryOrCreate}}
        {{- if and .mig $plugin.migLayouts }}
        - {name: mig-layouts, configMap: {name: {{ $plugin.migLayouts }}}}
        {{- end }}
        {{- with $plugin.kubeletConfigFile }}
        # The file alone, because its folder has kubelet's secrets. A file that is replaced rather than rewritten is read
        # after the next start of this pod.
        - {name: kubelet-config, hostPath: {path: {{ . }}, type: File}}
        {{- end }}
        {{- if eq $plugin.readPods "kubelet-credential" }}
        - {name: kubelet-conf, hostPath: {path: {{ $plugin.kubeletKubeconfig }}, type: File}}
        # The folder, because kubelet replaces its certificate.
        - {name: kubelet-pki, hostPath: {path: {{ $kubelet }}/pki, type: Directory}}
        {{- end }}
{{- end }}
