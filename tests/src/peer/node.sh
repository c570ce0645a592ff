# Makes FOLDER's parts the usual paths of this mount namespace, then becomes the program in its arguments once a line comes.
# Everything is private to the namespace and goes with it.
set -e
mount --bind "$FOLDER/lib" /var/lib
mount --bind "$FOLDER/run" /run
mount -t tmpfs -o mode=755 dev "$FOLDER/dev"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom "$FOLDER/gpus/root/dev/." "$FOLDER/dev/"
mount --move "$FOLDER/dev" /dev
mount --bind "$FOLDER/gpus/root/proc/driver" /proc/driver
mount --bind "$FOLDER/gpus/root/proc/devices" /proc/devices
mount --bind "$FOLDER/gpus/root/sys" /sys
echo ready
read -r go
exec "$@" >&2
