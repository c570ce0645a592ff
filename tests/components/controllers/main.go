// Command controllers runs the real controllers of JobSet, LeaderWorkerSet and PyTorchJob in one process, for the end-to-end tests.
//
// They come as module dependencies, unchanged. Their own programs are not used because each brings a certificate
// rotation that needs a Service and a Secret; the webhooks that label pods and fill in defaults are theirs and do run.
package main

import (
	"flag"
	"log"

	kubeflow "github.com/kubeflow/training-operator/pkg/apis/kubeflow.org/v1"
	kubeflowconfig "github.com/kubeflow/training-operator/pkg/config"
	"github.com/kubeflow/training-operator/pkg/controller.v1/common"
	"github.com/kubeflow/training-operator/pkg/controller.v1/pytorch"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	jobsetcontrollers "sigs.k8s.io/jobset/pkg/controllers"
	jobsetwebhooks "sigs.k8s.io/jobset/pkg/webhooks"
	lws "sigs.k8s.io/lws/api/leaderworkerset/v1"
	lwscontrollers "sigs.k8s.io/lws/pkg/controllers"
	lwswebhooks "sigs.k8s.io/lws/pkg/webhooks"
	coscheduling "sigs.k8s.io/scheduler-plugins/apis/scheduling/v1alpha1"
	volcano "volcano.sh/apis/pkg/apis/scheduling/v1beta1"
)

func main() {
	certs := flag.String("certs", "", "folder with the webhooks' tls.crt and tls.key")
	port := flag.Int("port", 9443, "port of the webhooks")
	inits := flag.String("pytorch-init", "", "file with the init containers of PyTorchJob's workers; its own asks a DNS for the master")
	probe := flag.String("probe", "127.0.0.1:9444", "address of /readyz")
	// --kubeconfig is a flag of controller-runtime.
	flag.Parse()
	ctrl.SetLogger(zap.New())

	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, jobset.AddToScheme, lws.AddToScheme, kubeflow.AddToScheme,
		// PyTorchJob's watches PodGroups wherever they are defined.
		coscheduling.AddToScheme, volcano.AddToScheme,
	} {
		must("scheme", add(scheme))
	}
	// Two of them have a controller named "pod".
	shared := true
	mgr, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Scheme:                 scheme,
		Controller:             config.Controller{SkipNameValidation: &shared},
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: *probe,
		WebhookServer:          webhook.NewServer(webhook.Options{Host: "127.0.0.1", Port: *port, CertDir: *certs}),
	})
	must("manager", err)
	ctx := ctrl.SetupSignalHandler()
	client, recorder := mgr.GetClient(), mgr.GetEventRecorderFor("controllers")

	must("JobSet", jobsetcontrollers.SetupJobSetIndexes(ctx, mgr.GetFieldIndexer()))
	must("JobSet", jobsetcontrollers.SetupPodIndexes(ctx, mgr.GetFieldIndexer()))
	must("JobSet", jobsetcontrollers.NewJobSetReconciler(client, scheme, recorder).SetupWithManager(mgr))
	must("JobSet", jobsetcontrollers.NewPodReconciler(client, scheme, recorder).SetupWithManager(mgr))
	// Its webhook for pods is for exclusive placement only, and has the same path as that of LeaderWorkerSet.
	jobsets, err := jobsetwebhooks.NewJobSetWebhook(client)
	must("JobSet", err)
	must("JobSet", jobsets.SetupWebhookWithManager(mgr))

	must("LeaderWorkerSet", lwscontrollers.SetupIndexes(mgr.GetFieldIndexer()))
	must("LeaderWorkerSet", lwscontrollers.NewLeaderWorkerSetReconciler(client, scheme, recorder).SetupWithManager(mgr))
	must("LeaderWorkerSet", lwscontrollers.NewPodReconciler(client, scheme, recorder, nil).SetupWithManager(mgr))
	must("LeaderWorkerSet", lwswebhooks.SetupLeaderWorkerSetWebhook(mgr))
	must("LeaderWorkerSet", lwswebhooks.NewPodWebhook(nil).Setup(mgr))

	kubeflowconfig.Config.PyTorchInitContainerTemplateFile = *inits
	pytorchjobs := pytorch.NewReconciler(mgr, common.GenNonGangSchedulerSetupFunc())
	must("PyTorchJob", pytorchjobs.SetupWithManager(mgr, 1))

	must("probe", mgr.AddReadyzCheck("webhooks", mgr.GetWebhookServer().StartedChecker()))
	must("probe", mgr.AddHealthzCheck("ping", healthz.Ping))
	must("manager", mgr.Start(ctx))
}

func must(what string, err error) {
	if err != nil {
		log.Fatalf("%s: %v", what, err)
	}
}
