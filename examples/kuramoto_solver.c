/* The flow of kuramoto.py as a solver of its own, on all ranks of COMM_WORLD but the first, which sends commands.
 *
 *     mpicc -O2 -o kuramoto_solver examples/kuramoto_solver.c -lm
 *     mpiexec -n 1 python -m mpi_util.serve examples.kuramoto_mpmd:make --ranks 1 : -n 2 ./kuramoto_solver
 */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <string.h>

enum { STOP, RESET, STEP };                             /* commands, as in kuramoto_mpmd.py */
enum { POINTS = 32, SENSORS = 8, ACTUATORS = 4, HALO = 2, SUBSTEPS = 12 };
static const double LENGTH = 22.0, WIDTH = 1.4, TIME_STEP = 0.02;

static MPI_Comm solvers;                                /* the ranks that have the flow */
static int rank, size, n;                               /* n: points of this rank */
static double dx, u[POINTS + 2 * HALO], shapes[ACTUATORS][POINTS];

static void exchange(void) {
    int left = (rank + size - 1) % size, right = (rank + 1) % size;
    MPI_Sendrecv(u + n, HALO, MPI_DOUBLE, right, 0, u, HALO, MPI_DOUBLE, left, 0, solvers, MPI_STATUS_IGNORE);
    MPI_Sendrecv(u + HALO, HALO, MPI_DOUBLE, left, 1, u + n + HALO, HALO, MPI_DOUBLE, right, 1, solvers,
                 MPI_STATUS_IGNORE);
}

static void advance(const double *action) {
    double change[POINTS], a2 = 1.0 / (dx * dx), a4 = a2 * a2;
    for (int k = 0; k < SUBSTEPS; k++) {
        exchange();
        for (int i = 0; i < n; i++) {
            const double *at = u + i + HALO;
            double force = 0.0, near = at[1] + at[-1], outer = at[2] + at[-2];
            double slope = (at[1] - at[-1]) * near * (0.25 / dx);
            for (int a = 0; a < ACTUATORS; a++) force += action[a] * shapes[a][i];
            change[i] = TIME_STEP * ((2 * a2 - 6 * a4) * at[0] + (4 * a4 - a2) * near - a4 * outer - slope + force);
        }
        for (int i = 0; i < n; i++) u[i + HALO] += change[i];
    }
}

/* The mean of u and of u^2 at each sensor, to the controller. */
static void answer(void) {
    double own[SENSORS][2], every[SENSORS][2];
    int cells = SENSORS / size, points = POINTS / SENSORS;
    for (int c = 0; c < cells; c++) {
        own[c][0] = own[c][1] = 0.0;
        for (int i = 0; i < points; i++) {
            double at = u[HALO + c * points + i];
            own[c][0] += at / points;
            own[c][1] += at * at / points;
        }
    }
    MPI_Gather(own, 2 * cells, MPI_DOUBLE, every, 2 * cells, MPI_DOUBLE, 0, solvers);
    if (rank == 0) MPI_Send(every, 2 * SENSORS, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
    double message[1 + ACTUATORS], field[POINTS];
    MPI_Init(&argc, &argv);
    MPI_Comm_split(MPI_COMM_WORLD, 1, 0, &solvers);
    MPI_Comm_rank(solvers, &rank);
    MPI_Comm_size(solvers, &size);
    if (SENSORS % size) {
        fprintf(stderr, "kuramoto_solver: %d ranks: 8 sensors are shared by 1, 2, 4 or 8 ranks\n", size);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    n = POINTS / size;
    dx = LENGTH / POINTS;
    for (int a = 0; a < ACTUATORS; a++) {
        double push[POINTS], mean = 0.0;
        for (int i = 0; i < POINTS; i++) {
            double apart = fabs(i * dx - (a + 0.5) * LENGTH / ACTUATORS);
            double nearer = fmin(apart, LENGTH - apart) / WIDTH;
            push[i] = exp(-0.5 * nearer * nearer);
            mean += push[i] / POINTS;
        }
        for (int i = 0; i < n; i++) shapes[a][i] = push[rank * n + i] - mean;
    }
    for (;;) {
        MPI_Bcast(message, 1 + ACTUATORS, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        if (message[0] == STOP) break;
        if (message[0] == RESET) {
            MPI_Bcast(field, POINTS, MPI_DOUBLE, 0, MPI_COMM_WORLD);
            memcpy(u + HALO, field + rank * n, n * sizeof(double));
        } else
            advance(message + 1);
        answer();
    }
    MPI_Finalize();
    return 0;
}
